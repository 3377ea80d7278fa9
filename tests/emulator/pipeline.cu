// C = A B^T in tiles of 64x32, steps of 32 in k, two stages of asynchronous copies. Right, and without races.

struct Params {
    const u16* a;  // (m, k) bf16
    const u16* b;  // (n, k) bf16
    float* c;      // (m, n)
    int m, n, k;
};

constexpr int TILE_M = 64, TILE_N = 32, TILE_K = 32;
constexpr u32 ROW_BYTES = TILE_K * 2 + 16;  // padded against bank conflicts
constexpr u32 STAGE_BYTES = (TILE_M + TILE_N) * ROW_BYTES;

// 4 chunks of 16 bytes a row; rows past `rows` become zeros.
__device__ __forceinline__ void load_rows(u32 smem, const u16* src, int tile_rows, int rows, int k) {
    for (int i = threadIdx.x; i < tile_rows * 4; i += blockDim.x) {
        const int row = i / 4, chunk = i % 4;
        cp_async_16(smem + row * ROW_BYTES + chunk * 16, src + row * k + chunk * 8, row < rows);
    }
}

extern "C" __global__ void __launch_bounds__(128, 1) pipeline(const __grid_constant__ Params params) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int n_tiles = (params.n + TILE_N - 1) / TILE_N;
    const int m0 = blockIdx.x / n_tiles * TILE_M, n0 = blockIdx.x % n_tiles * TILE_N;
    const int steps = params.k / TILE_K;

    auto load = [&](int step) {
        const u32 A_smem = shared_base() + step % 2 * STAGE_BYTES;
        load_rows(A_smem, params.a + m0 * params.k + step * TILE_K, TILE_M, params.m - m0, params.k);
        load_rows(A_smem + TILE_M * ROW_BYTES, params.b + n0 * params.k + step * TILE_K, TILE_N, params.n - n0,
                  params.k);
        cp_async_commit();
    };

    float C_rmem[4][4] = {};
    load(0);
    for (int step = 0; step < steps; ++step) {
        if (step + 1 < steps)
            load(step + 1);
        else
            cp_async_commit();  // an empty group, so that the wait below always leaves one
        cp_async_wait<1>();
        __syncthreads();  // this stage has landed for all
        const u32 A_smem = shared_base() + step % 2 * STAGE_BYTES, B_smem = A_smem + TILE_M * ROW_BYTES;
        for (int k = 0; k < TILE_K / 16; ++k) {
            u32 A_rmem[4];
            ldmatrix_x4(A_rmem, A_smem + (warp * 16 + lane % 16) * ROW_BYTES + k * 32 + lane / 16 * 16);
            for (int n = 0; n < 2; ++n) {
                u32 B_rmem[4];
                ldmatrix_x4(B_rmem,
                            B_smem + (n * 16 + lane % 8 + lane / 16 * 8) * ROW_BYTES + k * 32 + lane / 8 % 2 * 16);
                mma_m16n8k16_bf16(C_rmem[2 * n], A_rmem, B_rmem[0], B_rmem[1]);
                mma_m16n8k16_bf16(C_rmem[2 * n + 1], A_rmem, B_rmem[2], B_rmem[3]);
            }
        }
        __syncthreads();  // all have read this stage, which the next copies overwrite
    }
    for (int j = 0; j < 4; ++j) {
        for (int i = 0; i < 4; ++i) {
            const int row = m0 + warp * 16 + lane / 4 + i / 2 * 8, column = n0 + j * 8 + lane % 4 * 2 + i % 2;
            if (row < params.m && column < params.n) st_global_f32(params.c + row * params.n + column, C_rmem[j][i]);
        }
    }
}
