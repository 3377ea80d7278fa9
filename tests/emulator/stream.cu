// C = A B^T as Hopper does it: a producer warpgroup whose one thread loads tiles of 128x64 and 64x64, two consumer
// warpgroups with 64 rows each, full and empty barriers around two stages, tiles handed out to persistent blocks, C
// stored by the copy engine from shared memory. Right, and without races.

struct Params {
    TensorMap a;  // (m, k), box 64 x 128 rows, swizzle 128 B
    TensorMap b;  // (n, k), box 64 x 64 rows, swizzle 128 B
    TensorMap c;  // (m, n), box 64 x 64 rows, swizzle 128 B
    int m_tiles, n_tiles, steps;
};

constexpr int STAGES = 2;
constexpr u32 A_BYTES = 128 * 128, B_BYTES = 64 * 128, STAGE_BYTES = A_BYTES + B_BYTES, C_BYTES = 64 * 128;
constexpr u32 BARRIERS = STAGES * STAGE_BYTES + 2 * C_BYTES;

// K-major, 128-byte swizzle: 1024 bytes from 8 rows to the next 8.
__device__ __forceinline__ u64 descriptor(u32 address) {
    return address >> 4 | static_cast<u64>(1024 >> 4) << 32 | 1ull << 62;
}

extern "C" __global__ void __launch_bounds__(384, 1) stream(const __grid_constant__ Params params) {
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const u32 smem = shared_base(), full = smem + BARRIERS, empty = full + STAGES * 8;
    const int tiles = params.m_tiles * params.n_tiles;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(full + stage * 8, 1);
            mbarrier_init(empty + stage * 8, 2);
        }
        mbarrier_init_fence();
    }
    __syncthreads();

    if (group == 0) {
        setmaxnreg_dec<24>();
        if (threadIdx.x == 0) {
            int stage = 0;
            u32 phase = 0;
            for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
                const int m0 = tile / params.n_tiles * 128, n0 = tile % params.n_tiles * 64;
                for (int step = 0; step < params.steps; ++step) {
                    const u32 A_smem = smem + stage * STAGE_BYTES;
                    mbarrier_wait(empty + stage * 8, phase ^ 1);  // consumers have read the stage
                    mbarrier_arrive_expect_tx(full + stage * 8, STAGE_BYTES);
                    tma_load_4d(A_smem, params.a, step * 64, m0, 0, 0, full + stage * 8);
                    tma_load_4d(A_smem + A_BYTES, params.b, step * 64, n0, 0, 0, full + stage * 8);
                    if (++stage == STAGES) {
                        stage = 0;
                        phase ^= 1;
                    }
                }
            }
        }
    } else {
        setmaxnreg_inc<240>();
        const int consumer = group - 1;
        const u32 C_smem = smem + STAGES * STAGE_BYTES + consumer * C_BYTES;
        int stage = 0;
        u32 phase = 0;
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const int m0 = tile / params.n_tiles * 128, n0 = tile % params.n_tiles * 64;
            float C_rmem[8][4];
            for (int step = 0; step < params.steps; ++step) {
                const u32 A_smem = smem + stage * STAGE_BYTES + consumer * 64 * 128;
                const u32 B_smem = smem + stage * STAGE_BYTES + A_BYTES;
                mbarrier_wait(full + stage * 8, phase);
                wgmma_hold(C_rmem);
                wgmma_fence();
                for (int k = 0; k < 4; ++k)
                    wgmma_m64n64k16_bf16_ss<0, 0>(C_rmem, descriptor(A_smem + k * 32), descriptor(B_smem + k * 32),
                                                  step > 0 || k > 0);
                wgmma_commit();
                wgmma_wait<0>();
                wgmma_hold(C_rmem);
                if (threadIdx.x % 128 == 0) mbarrier_arrive(empty + stage * 8);
                if (++stage == STAGES) {
                    stage = 0;
                    phase ^= 1;
                }
            }

            if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();
            named_barrier_sync(1 + consumer, 128);  // the copy of the tile before has read C_smem
            const int row = warp * 16 + lane % 16;
            for (int j = 0; j < 4; ++j) {
                u32 packed[4];
                for (int i = 0; i < 4; ++i)
                    packed[i] = pack_bf16(C_rmem[2 * j + i / 2][i % 2 * 2], C_rmem[2 * j + i / 2][i % 2 * 2 + 1]);
                stmatrix_x4(C_smem + row * 128 + ((2 * j + lane / 16) ^ (row % 8)) * 16, packed);
            }
            fence_proxy_async();
            named_barrier_sync(1 + consumer, 128);  // all have written C_smem
            if (threadIdx.x % 128 == 0) {
                tma_store_4d(params.c, n0, m0 + consumer * 64, 0, 0, C_smem);
                tma_store_commit();
            }
        }
        if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();
    }
}
