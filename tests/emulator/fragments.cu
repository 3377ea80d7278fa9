// One warp: ldmatrix, plain and transposed, of a 16x16 tile, and one product of each element type.

struct Params {
    const u16* a;  // (16, 16)
    const u16* b;  // (8, 16): the columns of the product's right side
    u32* plain;    // (32, 4): what each lane receives
    u32* trans;    // (32, 4)
    float* d;      // (16, 8), added to
    int bf16;
};

extern "C" __global__ void __launch_bounds__(32, 1) fragments(const __grid_constant__ Params params) {
    const int lane = threadIdx.x;
    const u32 A_smem = shared_base(), B_smem = A_smem + 512;
    cp_async_16(A_smem + lane * 16, params.a + lane * 8, true);
    if (lane < 16) cp_async_16(B_smem + lane * 16, params.b + lane * 8, true);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();

    // Matrices 0 to 3: rows 0-7 and 8-15 of columns 0-7, then of columns 8-15.
    u32 A_rmem[4], A_trans[4];
    ldmatrix_x4(A_rmem, A_smem + lane % 16 * 32 + lane / 16 * 16);
    ldmatrix_x4_trans(A_trans, A_smem + lane % 16 * 32 + lane / 16 * 16);
    st_global_b128(params.plain + lane * 4, A_rmem);
    st_global_b128(params.trans + lane * 4, A_trans);

    u32 B_rmem[4];  // twice the same two matrices
    ldmatrix_x4(B_rmem, B_smem + lane % 8 * 32 + lane / 8 % 2 * 16);
    float D_rmem[4];
    float* d[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        d[i] = params.d + (lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2;
        D_rmem[i] = ld_global_f32(d[i]);
    }
    if (params.bf16)
        mma_m16n8k16_bf16(D_rmem, A_rmem, B_rmem[0], B_rmem[1]);
    else
        mma_m16n8k16_f16(D_rmem, A_rmem, B_rmem[0], B_rmem[1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) st_global_f32(d[i], D_rmem[i]);
}
