// d += a b for a 16x16 a (row major), a 16x8 b (column major) and float32 accumulators (PTX ISA, "Matrix Fragments for
// mma.m16n8k16 with floating point type"). With g = lane / 4 and t = lane % 4, a lane holds
//   a: rows g, g + 8, g, g + 8 at columns 2t, 2t, 2t + 8, 2t + 8 (and the next column in the upper half),
//   b: rows 2t and 2t + 8 (and the next row) of column g,    d: rows g, g, g + 8, g + 8 at columns 2t, 2t + 1, 2t, 2t
//   + 1.
// Products of two 16-bit floats are exact in float32. The sum runs over k in order, each step rounded to nearest; the
// order and rounding of the hardware are not documented, but not better than that.

namespace emu {

struct Mma {
    float* d;
    const u32* a;
    u32 b[2];
};

template <float (&decode)(u32)>
static void multiply(Warp& warp, u32, int) {
    float a[16][16], b[16][8], d[16][8];
    for (u32 lane = 0; lane < LANES; lane++) {
        const Mma& mine = *(const Mma*)warp.lanes[lane].operands;
        const u32 g = lane / 4, t = lane % 4;
        for (u32 i = 0; i < 4; i++) {
            float* to = &a[g + i % 2 * 8][2 * t + i / 2 * 8];
            to[0] = decode(mine.a[i] & 0xffff);
            to[1] = decode(mine.a[i] >> 16);
            d[g + i / 2 * 8][2 * t + i % 2] = mine.d[i];
        }
        for (u32 i = 0; i < 2; i++) {
            b[2 * t + i * 8][g] = decode(mine.b[i] & 0xffff);
            b[2 * t + i * 8 + 1][g] = decode(mine.b[i] >> 16);
        }
    }
    for (u32 m = 0; m < 16; m++)
        for (u32 k = 0; k < 16; k++)
            for (u32 n = 0; n < 8; n++) d[m][n] += a[m][k] * b[k][n];
    for (u32 lane = 0; lane < LANES; lane++) {
        const Mma& mine = *(const Mma*)warp.lanes[lane].operands;
        const u32 g = lane / 4, t = lane % 4;
        for (u32 i = 0; i < 4; i++) mine.d[i] = d[g + i / 2 * 8][2 * t + i % 2];
    }
}

}  // namespace emu

static inline void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, int line = __builtin_LINE()) {
    emu::Mma operands = {d, a, {b0, b1}};
    emu::collective("mma_m16n8k16_bf16", emu::ALL_LANES, &operands, line, emu::multiply<emu::from_bf16>);
}

static inline void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, int line = __builtin_LINE()) {
    emu::Mma operands = {d, a, {b0, b1}};
    emu::collective("mma_m16n8k16_f16", emu::ALL_LANES, &operands, line, emu::multiply<emu::from_f16>);
}
