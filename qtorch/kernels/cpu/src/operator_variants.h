// Which variant of multiplying runs for how many rows: the table of ../variants.json, as text.
#pragma once

#include <string>
#include <vector>

#include "calls.h"

namespace {

constexpr const char* VARIANT_NAMES[] = {"dot", "tile", "amx", "fixed", "channels", "torch", "float"};  // numbered as Variant goes on
constexpr int64_t FLOAT_VARIANT = 6, VARIANTS = 7;

inline int64_t variant_named(const std::string& name) {
    for (int64_t variant = 0; variant < VARIANTS; variant++)
        if (name == VARIANT_NAMES[variant]) return variant;
    return -1;
}

class Variants {
public:
    // What the tables whose names begin with these words say: "avx2", or "avx2 on AuthenticAMD". Of several, the last
    // counts.
    void read(const std::string& text, const std::string& words) {
        auto counts = [&](const std::string& name) { return name == words || name.rfind(words + " ", 0) == 0; };
        // A string is a key if a number or null follows, the name of a variant after one of these, else a table.
        std::string section, key;
        bool fresh = false, limited = false;  // whether nothing followed the key yet; whether a variant has to follow
        int64_t limit = 0;
        for (size_t at = 0; at < text.size(); at++) {
            char c = text[at];
            if (c == '"') {
                size_t end = text.find('"', at + 1);
                if (end == std::string::npos) return;
                std::string word = text.substr(at + 1, end - at - 1);
                at = end;
                if (limited) {
                    int64_t slot = slot_named(key);
                    if (counts(section) && slot >= 0) steps_[slot].push_back({limit, variant_named(word)});
                    limited = false;
                    continue;
                }
                if (fresh) section = key;
                key = word;
                fresh = true;
            } else if (c == 'n' || (c >= '0' && c <= '9')) {
                if (fresh && counts(section) && slot_named(key) >= 0) steps_[slot_named(key)].clear();
                limit = INT64_MAX;
                size_t length = 4;  // of "null"
                if (c != 'n') limit = std::stoll(text.substr(at, 18), &length);
                at += length - 1;
                fresh = false, limited = true;
            }
        }
    }

    void force(const std::string& variant) { forced_ = variant_named(variant); }

    // The variant for x of this type, INT8 for codes, and this weight; "copied" if dequantized copies may be kept. -1: unknown.
    int64_t choose(int64_t type, const Weight& w, int64_t rows, bool copied) const {
        if (forced_ >= 0) return forced_;
        for (const Step& step : steps_[slot(type, w.bits > 0, form_of(type, w), w.n * w.k > SMALL, copied)])
            if (rows <= step.rows) return step.variant;
        return -1;
    }

private:
    struct Step {
        int64_t rows, variant;
    };
    static constexpr int64_t SMALL = 1 << 20;  // as in ../variants.py

    enum Form : int64_t { ROWS, GROUPS, SHORT_GROUPS };  // of the scales

    static int64_t form_of(int64_t type, const Weight& w) {
        return type == INT8 && w.has_short_groups() ? SHORT_GROUPS : w.groups > 1 ? GROUPS : ROWS;
    }

    static int64_t slot(int64_t type, bool packed, int64_t form, bool large, bool copied) {
        return (type == INT8 ? 3 : type) * 24 + packed * 12 + form * 4 + large * 2 + copied;
    }

    static int64_t slot_named(const std::string& key) {
        constexpr const char* NAMES[] = {"float32 ", "bfloat16 ", "float16 ", "int8 "};
        auto has = [&](const char* word) { return key.find(word) != std::string::npos; };
        for (int64_t type = 0; type < 4; type++)
            if (key.rfind(NAMES[type], 0) == 0)
                return slot(type == 3 ? (int64_t)INT8 : type, has(" packed"),
                            has(" short groups") ? SHORT_GROUPS : has(" groups") ? GROUPS : ROWS, has(" large"), has(" copied"));
        return -1;
    }

    std::vector<Step> steps_[96];
    int64_t forced_ = -1;
};

}  // namespace
