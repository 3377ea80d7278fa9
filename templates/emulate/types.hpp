using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

namespace emu {

static inline float from_bits(u32 bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline float from_bf16(u32 bits) { return from_bits(bits << 16); }

// Exponent and mantissa move to their places, and a multiplication by 2^112 mends the bias, of subnormals too.
static inline float from_f16(u32 bits) {
    const float magnitude = from_bits((bits & 0x7fff) << 13) * from_bits(0x77800000);
    u32 result;
    memcpy(&result, &magnitude, 4);
    const u32 special = (bits & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;  // inf or NaN: the largest exponent
    return from_bits(result | special | (bits & 0x8000) << 16);
}

}  // namespace emu
