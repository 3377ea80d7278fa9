// The products of cards before sm80, 8 deep (PTX ISA, "Matrix Fragments for mma.m16n8k8"). With g = lane / 4 and
// t = lane % 4, a lane holds
//   a: rows g and g + 8 at column 2t (and the next column in the upper half),
//   b: row 2t (and the next row) of column g,    d: rows g, g, g + 8, g + 8 at columns 2t, 2t + 1, 2t, 2t + 1.
// Sums as those of mma.hpp: over k in order, each step rounded to nearest.

namespace emu {

struct MmaK8 {
    float* d;
    u32 a[2], b;
};

static void multiply_k8(Warp& warp, u32, int) {
    float a[16][8], b[8][8];
    for (u32 lane = 0; lane < LANES; lane++) {
        const MmaK8& mine = *(const MmaK8*)warp.lanes[lane].operands;
        const u32 g = lane / 4, t = lane % 4;
        for (u32 half = 0; half < 2; half++) {
            a[g][2 * t + half] = from_f16(mine.a[0] >> 16 * half & 0xffff);
            a[g + 8][2 * t + half] = from_f16(mine.a[1] >> 16 * half & 0xffff);
            b[2 * t + half][g] = from_f16(mine.b >> 16 * half & 0xffff);
        }
    }
    for (u32 lane = 0; lane < LANES; lane++) {
        float* d = ((const MmaK8*)warp.lanes[lane].operands)->d;
        for (u32 i = 0; i < 4; i++)
            for (u32 k = 0; k < 8; k++) d[i] += a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2];
    }
}

}  // namespace emu

static inline void mma_m16n8k8_f16(float (&d)[4], u32 a0, u32 a1, u32 b, int line = __builtin_LINE()) {
    emu::MmaK8 operands = {d, {a0, a1}, b};
    emu::collective("mma_m16n8k8_f16", emu::ALL_LANES, &operands, line, emu::multiply_k8);
}

static inline void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, int line = __builtin_LINE()) {
    mma_m16n8k8_f16(d, a[0], a[1], b0, line);
    mma_m16n8k8_f16(d, a[2], a[3], b1, line);
}
