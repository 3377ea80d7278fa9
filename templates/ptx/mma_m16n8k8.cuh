// The products of cards before sm80, 8 deep. With g = lane / 4 and t = lane % 4, a lane holds
//   a: rows g and g + 8 at column 2t (and the next column in the upper half),
//   b: row 2t (and the next row) of column g,
//   d: rows g, g, g + 8, g + 8 at columns 2t, 2t + 1, 2t, 2t + 1.

// d += a b for a 16x8 a (row major), an 8x8 b (column major) and float32 accumulators.
__device__ __forceinline__ void mma_m16n8k8_f16(float (&d)[4], u32 a0, u32 a1, u32 b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(b));
}

// The same 16 deep: the fragments of sm80's product, of which the halves are those of two.
__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    mma_m16n8k8_f16(d, a[0], a[1], b0);
    mma_m16n8k8_f16(d, a[2], a[3], b1);
}
