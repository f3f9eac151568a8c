// exp and tanh of vectors of fp32.
#pragma once

#include "simd.h"

namespace {

// exp(x) of x <= 0, to 2 units in the last place; 0 below the normal numbers, NaN of NaN.
INLINE Floats exp_negative(Floats x) {
    Floats n = round_even(x * broadcast(1.44269504f));
    Floats r = fma(n, broadcast(-0.693359375f), x);
    r = fma(n, broadcast(2.12194440e-4f), r);
    Floats p = broadcast(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = fma(p, r, broadcast(c));
    p = fma(p, r * r, r) + broadcast(1);
    Ints low = x < broadcast(-87.0f);
    Ints power = (to_ints((Floats)((Ints)n & ~low)) + 127) << 23;
    return (Floats)((Ints)(p * (Floats)power) & ~low);
}

inline float exp_negative(float x) {
    return exp_negative(broadcast(x))[0];
}

// tanh(x), to 4 units in the last place.
INLINE Floats tanh_of(Floats x) {
    Floats size = (Floats)((Ints)x & 0x7fffffff), square = x * x;
    // Lambert's continued fraction.
    Floats p = fma(square, fma(square, square + broadcast(378), broadcast(17325)), broadcast(135135));
    Floats q = fma(square, fma(square, fma(square, broadcast(28), broadcast(3150)), broadcast(62370)), broadcast(135135));
    Floats near = x * p / q, e = exp_negative(size * broadcast(-2));
    Floats far = (broadcast(1) - e) / (broadcast(1) + e);
    far = (Floats)((Ints)far | ((Ints)x & (int32_t)0x80000000));
    Ints small = size < broadcast(0.5f);
    return (Floats)(((Ints)near & small) | ((Ints)far & ~small));
}

}  // namespace
