// Bulk copies: each block loads rows of its own, and adds one row to a sum of all blocks.

struct Params {
    const float* from;   // (blocks, words)
    const float* terms;  // (blocks, words)
    float* loaded;       // (blocks, words): `from`, by one access of four numbers
    float* pairs;        // (blocks, words): `from`, by two accesses of two
    float* sum;          // (words): of `terms`, added to what it has
    int words;           // a multiple of 4
    int place;           // of the row in shared memory, bytes
};

extern "C" __global__ void __launch_bounds__(128, 1) bulk(const __grid_constant__ Params params) {
    const u32 barrier = shared_base(), row = shared_base() + params.place;
    const int begin = blockIdx.x * params.words;
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        mbarrier_init_fence();
        mbarrier_arrive_expect_tx(barrier, params.words * 4);
        bulk_load(row, params.from + begin, params.words * 4, barrier);
    }
    __syncthreads();
    mbarrier_wait(barrier, 0);
    for (int i = threadIdx.x * 4; i < params.words; i += 512) {
        float four[4], low[2], high[2];
        ld_shared_f32x4(four, row + i * 4);
        ld_shared_f32x2(low, row + i * 4);
        ld_shared_f32x2(high, row + i * 4 + 8);
        for (int j = 0; j < 4; ++j) {
            st_global_f32(params.loaded + begin + i + j, four[j]);
            st_global_f32(params.pairs + begin + i + j, j < 2 ? low[j] : high[j - 2]);
        }
    }
    __syncthreads();  // all have read the row
    for (int i = threadIdx.x * 4; i < params.words; i += 512) {
        u32 v[4];
        ld_global_b128(v, params.terms + begin + i);
        st_shared_b128(row + i * 4, v);
    }
    fence_proxy_async();
    __syncthreads();  // all have written it
    if (threadIdx.x == 0) {
        bulk_add_f32(params.sum, row, params.words * 4);
        tma_store_commit();
        tma_store_wait_read<0>();
        st_shared_b32(row, 0);  // what has been read may be written
    }
}
