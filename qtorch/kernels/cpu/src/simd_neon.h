// Dot products of bytes on Arm, for simd.h: its sets "dotprod" and "i8mm".
#pragma once

#include "simd.h"

namespace {

#define HAS_VNNI 1
// As on x86: see simd.h.
INLINE Ints dot4(Ints total, Ints unsigned_bytes, Ints signed_bytes) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return (Ints)vusdotq_s32((int32x4_t)total, (uint8x16_t)unsigned_bytes, (int8x16_t)signed_bytes);
#else
    // Signed bytes with signed ones only: u * s = (u - 128) * s + 128 * s.
    int8x16_t s = (int8x16_t)signed_bytes, less = (int8x16_t)((Bytes)unsigned_bytes ^ (Bytes{} + (uint8_t)128));
    int32x4_t sums = vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(1), s);
    return (Ints)vdotq_s32((int32x4_t)total, less, s) + (Ints)vshlq_n_s32(sums, 7);
#endif
}

// As on x86.
INLINE Floats permute(Floats v, Ints order) {
    return Floats{v[order[0]], v[order[1]], v[order[2]], v[order[3]]};
}

INLINE Bytes look_up(const uint8_t (&bytes)[16], Bytes codes) { return (Bytes)vqtbl1q_u8(vld1q_u8(bytes), (uint8x16_t)codes); }

}  // namespace
