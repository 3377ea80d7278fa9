// Accesses of shared memory whose bank conflicts are known. `// BANKS a w l` marks a line at which each warp makes `a`
// accesses that take `w` wavefronts together, `l` if no bank were in the way of another.

struct Params {
    float* out;  // (1)
};

constexpr u32 WARP_BYTES = 4096;

extern "C" __global__ void __launch_bounds__(64, 1) conflicts(const __grid_constant__ Params params) {
    const int lane = threadIdx.x % 32;
    const u32 smem = shared_base() + threadIdx.x / 32 * WARP_BYTES;
    const u32 zeros[4] = {0, 0, 0, 0};
    for (int i = 0; i < 8; ++i) st_shared_b128(smem + (i * 32 + lane) * 16, zeros);  // BANKS 8 32 32
    __syncwarp();

    st_shared_b32(smem + lane * 4, 0);  // BANKS 1 1 1
    __syncwarp();
    st_shared_b32(smem + lane * 8, 0);  // BANKS 1 2 1
    __syncwarp();
    st_shared_b32(smem + lane * 128, 0);  // BANKS 1 32 1
    __syncwarp();
    if (lane < 16) st_shared_b32(smem + lane * 8, 0);  // BANKS 1 1 1
    __syncwarp();

    float sum = ld_shared_f32(smem);                  // BANKS 1 1 1
    sum += ld_shared_f32(smem + lane % 4 * 128);      // BANKS 1 4 1
    sum += ld_shared_f32(smem + (lane ^ 5) * 4 + 4);  // BANKS 1 1 1
    u32 v[4];
    ld_shared_b128(v, smem + lane * 16);      // BANKS 1 4 4
    ld_shared_b128(v, smem + lane * 32);      // BANKS 1 8 4
    ld_shared_b128(v, smem + 64);             // BANKS 1 4 4
    ldmatrix_x4(v, smem + lane * 16);         // BANKS 1 4 4
    ldmatrix_x4_trans(v, smem + lane * 128);  // BANKS 1 32 4
    // 32 lanes come here once, 16 of them twice and 8 three times: with 2, 4 and 8 words between them, two on a bank.
    for (int i = 0; i <= (lane % 2 == 0) + (lane % 4 == 0); ++i) sum += ld_shared_f32(smem + lane * 8);  // BANKS 3 6 3
    __syncwarp();
    cp_async_4(smem + lane * 4, params.out, false);         // BANKS 1 1 1
    cp_async_4(smem + 1024 + lane * 8, params.out, false);  // BANKS 1 2 1
    cp_async_commit();
    cp_async_wait<0>();
    if (threadIdx.x == 0 && blockIdx.x == 0) st_global_f32(params.out, sum);
}
