// One deliberate error for each number of `fault`, in block 1 alone, on the line that its name marks; 0 is none.

struct Params {
    TensorMap input;      // (16, 64), box 8 x 64, swizzle 128 B
    TensorMap output;     // likewise
    TensorMap read_only;  // likewise, passed as not writable
    TensorMap beyond;     // of one row more than its tensor has
    const float* no_map;  // something else
    const float* rows;    // what `input` is of
    float* sum;           // what `output` is of
    float* fixed;         // what `read_only` is of
    int fault;
};

constexpr u32 BOX = 1024, BOX_BYTES = 1024;           // in shared memory
constexpr u32 A_TILE = 2048, B_TILE = A_TILE + 8192;  // 64 and 16 rows of 64 elements
constexpr u32 UNWRITTEN = B_TILE + 2048, SHARED_BYTES = UNWRITTEN + 1024;

// K-major, 128-byte swizzle: 1024 bytes from 8 rows to the next 8.
__device__ __forceinline__ u64 descriptor(u32 address) {
    return address >> 4 | static_cast<u64>(1024 >> 4) << 32 | 1ull << 62;
}

extern "C" __global__ void __launch_bounds__(256, 1) hopper_faults(const __grid_constant__ Params params) {
    const int thread = threadIdx.x;
    const u32 smem = shared_base();
    const u32 one = smem, two = smem + 8, fresh = smem + 16;  // mbarriers for one and two arrivals; and none
    const int fault = blockIdx.x == 1 ? params.fault : 0;
    const u32 zeros[4] = {0, 0, 0, 0};
    const u64 a = descriptor(smem + A_TILE), b = descriptor(smem + B_TILE);
    float d[2][4] = {};

    if (thread == 0) {
        mbarrier_init(one, 1);
        mbarrier_init(two, 2);
        mbarrier_init_fence();
    }
    for (u32 i = thread * 16; i < UNWRITTEN - BOX; i += 256 * 16) st_shared_b128(smem + BOX + i, zeros);
    fence_proxy_async();
    __syncthreads();

    if (fault == 1) {
        if (thread == 35) mbarrier_arrive(fresh);  // FAULT mbarrier_uninitialised
    }
    if (fault == 2) {
        if (thread == 3) mbarrier_init(fresh, 1);
        if (thread == 37) mbarrier_arrive(fresh);  // FAULT mbarrier_init_unordered
    }
    if (fault == 3) {
        if (thread == 35) mbarrier_arrive_expect_tx(one, 16);
        if (thread == 35) mbarrier_arrive(one);  // FAULT mbarrier_too_many_arrivals
    }
    if (fault == 4) {
        if (thread == 35) mbarrier_arrive(two);
        if (thread == 36) mbarrier_wait(two, 0);  // FAULT mbarrier_too_few_arrivals
    }
    if (fault == 5) {
        if (thread == 35) mbarrier_arrive(one);
        if (thread == 35) mbarrier_wait(one, 1);  // FAULT mbarrier_wrong_parity
    }
    if (fault == 6) {
        if (thread == 35) st_shared_b32(smem + 4, 0);  // FAULT mbarrier_overwritten
    }
    if (fault == 7) {
        if (thread == 35) ld_shared_b32(smem + 8);  // FAULT mbarrier_read
    }
    if (fault == 8) {
        if (thread == 35) mbarrier_arrive_expect_tx(one, 2 * BOX_BYTES);
        if (thread == 35) tma_load_4d(smem + BOX, params.input, 0, 0, 0, 0, one);
        if (thread == 36) mbarrier_wait(one, 0);  // FAULT bytes_never_copied
    }
    if (fault == 9) {
        if (thread == 35) mbarrier_wait(one, 2);  // FAULT mbarrier_parity_two
    }
    if (fault == 10) {
        if (thread == 35) mbarrier_arrive(smem + 4);  // FAULT mbarrier_misaligned
    }
    if (fault == 11) {
        if (thread == 35) mbarrier_init(one, 1);  // FAULT mbarrier_initialised_twice
    }
    if (fault == 12) {
        if (thread == 35) mbarrier_init(fresh, gridDim.x - 3);  // FAULT mbarrier_for_nobody
    }
    if (fault == 13) {
        if (thread == 35) mbarrier_init(fresh, 1);
        if (thread == 35) tma_load_4d(smem + BOX, params.input, 0, 0, 0, 0, fresh);  // FAULT load_without_init_fence
    }
    if (fault == 14) {
        if (thread == 35) tma_load_4d(smem + BOX, params.input, 0, 0, 0, 0, one);
        if (thread == 35) mbarrier_arrive(one);
        if (thread == 35) mbarrier_wait(one, 0);
        if (thread == 35) ld_shared_b32(smem + BOX);  // FAULT load_not_announced
    }
    if (fault == 15) {
        if (thread == 35) mbarrier_arrive_expect_tx(one, BOX_BYTES);
        if (thread == 35) tma_load_4d(smem + BOX, params.input, 0, 0, 0, 0, one);
        __syncthreads();
        if (thread == 70) ld_shared_b32(smem + BOX);  // FAULT load_not_waited_for
    }
    if (fault == 16) {
        if (thread == 35) mbarrier_arrive_expect_tx(one, BOX_BYTES);
        if (thread == 35) tma_load_4d(smem + BOX, params.input, 0, 0, 0, 0, one);
        if (thread == 35) mbarrier_wait(one, 0);
        d[0][0] = __shfl_xor_sync(0xffffffffu, d[0][0], 1);  // orders no memory
        if (thread == 36) ld_shared_b32(smem + BOX);         // FAULT load_waited_for_by_another
    }
    if (fault == 17) {
        if (thread == 3) ld_shared_b32(smem + BOX);
        if (thread == 35) mbarrier_arrive_expect_tx(one, BOX_BYTES);
        if (thread == 35) tma_load_4d(smem + BOX, params.input, 0, 0, 0, 0, one);  // FAULT load_over_read
    }
    if (fault == 18) {
        if (thread == 35) tma_load_4d(smem + BOX, params.input, 0, 0, 0, 0, one);
        if (thread == 35) st_shared_b32(smem + BOX + 8, 0);  // FAULT store_over_load
    }
    if (fault == 63) {
        if (thread == 3) ld_shared_b32(smem + BOX + 4);
        __syncthreads();
        if (thread == 35) mbarrier_arrive_expect_tx(one, BOX_BYTES);
        if (thread == 35) tma_load_4d(smem + BOX, params.input, 0, 0, 0, 0, one);  // FAULT load_over_read_unfenced
    }
    if (fault == 19) {
        if (thread == 35) tma_load_4d(smem + BOX + 64, params.input, 0, 0, 0, 0, one);  // FAULT load_misaligned
    }
    if (fault == 20) {
        if (thread == 35) tma_load_4d(smem + SHARED_BYTES - 512, params.input, 0, 0, 0, 0, one);  // FAULT load_past_end
    }
    if (fault == 21) {
        const TensorMap& map = *reinterpret_cast<const TensorMap*>(params.no_map);
        if (thread == 35) tma_load_4d(smem + BOX, map, 0, 0, 0, 0, one);  // FAULT load_by_no_map
    }
    if (fault == 62) {
        TensorMap nowhere = params.input;
        nowhere.opaque[1] = 0;
        if (thread == 35) tma_load_4d(smem + BOX, nowhere, 0, 16, 0, 0, one);  // FAULT load_from_address_0
    }
    if (fault == 22) {
        if (thread == 35) mbarrier_arrive_expect_tx(one, BOX_BYTES);
        if (thread == 35) tma_load_4d(smem + BOX, params.beyond, 0, 16, 0, 0, one);  // FAULT load_past_tensor
        if (thread == 35) mbarrier_wait(one, 0);
    }
    if (fault == 23) {
        if (thread == 35) st_shared_b32(smem + BOX + 12, 1);
        if (thread == 35) tma_store_4d(params.output, 0, 0, 0, 0, smem + BOX);  // FAULT store_without_fence
    }
    if (fault == 24) {
        if (thread == 70) st_shared_b32(smem + BOX + 12, 1);
        __syncthreads();
        if (thread == 70) fence_proxy_async();
        if (thread == 135) tma_store_4d(params.output, 0, 0, 0, 0, smem + BOX);  // FAULT store_after_late_fence
    }
    if (fault == 25) {
        if (thread == 35) tma_store_4d(params.output, 0, 0, 0, 0, smem + BOX);
        if (thread == 35) tma_store_commit();
        if (thread == 35) st_shared_b32(smem + BOX + 12, 1);  // FAULT store_source_overwritten
    }
    if (fault == 26) {
        if (thread == 35) {
            tma_store_4d(params.output, 0, 0, 0, 0, smem + BOX);
            tma_store_commit();
            tma_store_4d(params.output, 0, 8, 0, 0, smem + BOX + BOX_BYTES);
            tma_store_commit();
            tma_store_wait_read<1>();
            st_shared_b32(smem + BOX, 1);
            st_shared_b32(smem + BOX + BOX_BYTES, 1);  // FAULT store_wait_for_too_few
        }
    }
    if (fault == 27) {
        if (thread == 3) st_shared_b32(smem + BOX, 1);
        if (thread == 3) fence_proxy_async();
        if (thread == 35) tma_store_4d(params.output, 0, 0, 0, 0, smem + BOX);  // FAULT store_unordered
    }
    if (fault == 28) {
        if (thread == 35) tma_store_4d(params.read_only, 0, 0, 0, 0, smem + BOX);  // FAULT store_to_read_only
    }
    if (fault == 29) {
        if (thread == 35) mbarrier_arrive_expect_tx(one, BOX_BYTES);
        if (thread == 35) tma_load_4d(smem + BOX, params.input, 0, 0, 0, 0, one);  // FAULT load_never_waited_for
    }
    if (fault == 30) {
        if (thread < 128) wgmma_m64n16k16_bf16_ss<0, 0>(d, a, b, false);  // FAULT product_without_fence
    }
    if (fault == 31) {
        if (thread < 128) wgmma_fence();
        st_shared_b32(smem + A_TILE + thread * 4, 1);
        __syncthreads();
        if (thread < 128) wgmma_m64n16k16_bf16_ss<0, 0>(d, a, b, false);  // FAULT product_without_proxy_fence
    }
    if (fault == 32) {
        if (thread < 96) wgmma_fence();
        if (thread < 96) wgmma_m64n16k16_bf16_ss<0, 0>(d, a, b, false);  // FAULT product_of_three_warps
    }
    if (fault == 33 && thread < 128) {
        wgmma_fence();
        if (thread < 64)
            wgmma_m64n16k16_bf16_ss<0, 0>(d, a, b, false);
        else
            wgmma_m64n16k16_bf16_ss<0, 0>(d, a, b, false);  // FAULT product_divergent
    }
    if (fault == 34 && thread < 128) {
        wgmma_fence();
        wgmma_m64n16k16_bf16_ss<0, 0>(d, a, b, false);  // FAULT exit_with_product
        wgmma_commit();
        return;
    }
    if (fault == 35 && thread < 128) {
        wgmma_fence();
        wgmma_m64n16k16_bf16_ss<0, 0>(d, a, b, false);  // FAULT accumulator_written
        wgmma_commit();
        if (thread == 5) d[1][2] = 1.0f;
        wgmma_wait<0>();
    }
    if (fault == 36 && thread < 128) {
        wgmma_fence();
        wgmma_m64n16k16_bf16_ss<0, 0>(d, a, b, false);
        wgmma_commit();
        if (thread == 5) st_shared_b32(smem + B_TILE, 1);  // FAULT operand_overwritten
        wgmma_wait<0>();
    }
    if (fault == 37 && thread < 128) {
        wgmma_fence();
        wgmma_m64n16k16_bf16_ss<0, 0>(d, a, b, false);
        wgmma_commit();
        if (thread == 5) tma_load_4d(smem + A_TILE, params.input, 0, 0, 0, 0, one);  // FAULT load_over_product
        wgmma_wait<0>();
    }
    if (fault == 38 && thread < 128) {
        wgmma_fence();
        wgmma_m64n16k16_bf16_ss<0, 0>(d, a, b, false);
        wgmma_commit();
        wgmma_m64n16k16_bf16_ss<0, 0>(d, a, b + 2, true);
        wgmma_commit();
        wgmma_wait<1>();
        if (thread == 5) st_shared_b32(smem + B_TILE, 1);
        if (thread == 5) st_shared_b32(smem + B_TILE + 32, 1);  // FAULT wait_for_too_few_products
        wgmma_wait<0>();
    }
    if (fault == 39) {
        if (thread < 128) wgmma_fence();
        if (thread < 128) wgmma_m64n16k16_bf16_ss<0, 0>(d, a + 512, b, false);  // FAULT descriptor_past_end
    }
    if (fault == 40) {
        if (thread < 128) wgmma_fence();
        if (thread < 128) wgmma_m64n16k16_bf16_ss<0, 0>(d, a, b + thread / 77, false);  // FAULT descriptors_differ
    }
    if (fault == 41) {
        if (thread < 128) wgmma_fence();
        if (thread < 128) wgmma_m64n16k16_bf16_ss<0, 0>(d, a, b + 64, false);  // FAULT operand_unwritten
    }
    if (fault == 42) {
        if (thread < 128) setmaxnreg_inc<256>();  // FAULT registers_never_free
    }
    if (fault == 43) {
        if (thread < 128) setmaxnreg_dec<24>();
        if (thread < 128) setmaxnreg_dec<32>();  // FAULT registers_given_back_upwards
    }
    if (fault == 44) {
        if (thread < 32) named_barrier_sync(1, 64);
        if (thread / 32 == 1) named_barrier_sync(1, 96);  // FAULT named_counts_differ
    }
    if (fault == 45) {
        if (thread < 32) named_barrier_sync(3, 64);  // FAULT named_too_few
    }
    if (fault == 46) {
        if (thread < 32) named_barrier_sync(16, 32);  // FAULT named_sixteen
    }
    if (fault == 47) {
        if (thread % 32 < 16 && thread < 64) named_barrier_sync(1, 32);  // FAULT named_half_warps
    }
    if (fault == 48) {
        if (thread < 32) named_barrier_arrive(1, 40);  // FAULT named_odd_count
    }
    if (fault == 49) {
        if (thread < 32) named_barrier_arrive(1, 96);
        if (thread < 32) named_barrier_arrive(1, 96);  // FAULT named_twice
    }
    if (fault == 50) {
        if (thread < 32)
            stmatrix_x4(smem + BOX + thread * 16 + (thread == 9 ? 8 : 0), zeros);  // FAULT stmatrix_misaligned
    }
    if (fault == 51) {
        if (thread < 32) stmatrix_x4(smem + BOX + thread * 16, zeros);
        if (thread == 40) ld_shared_b32(smem + BOX + 5 * 16);  // FAULT stmatrix_unordered
    }
    if (fault == 52) {
        if (thread == 3) mbarrier_arrive(one);
        if (thread == 3) st_shared_b32(smem + BOX, 1);
        if (thread == 70) mbarrier_wait(one, 0);
        if (thread == 70) ld_shared_b32(smem + BOX);  // FAULT written_after_arrival
    }
    if (fault == 53) {
        if (thread < 32) st_shared_b32(smem + BOX + thread * 4, 1);
        if (thread == 0) mbarrier_arrive(one);  // without __syncwarp
        if (thread == 70) mbarrier_wait(one, 0);
        if (thread == 70) ld_shared_b32(smem + BOX);
        if (thread == 70) ld_shared_b32(smem + BOX + 4);  // FAULT arrival_of_one_lane
    }
    if (fault == 54) {
        if (thread / 32 == 1) st_shared_b32(smem + BOX, 1);  // FAULT warp_races_after_mbarriers
    }
    if (fault == 55) {
        // Each of six warps reads two words, none ordered before another; then a seventh may write them.
        if (thread % 32 == 0 && thread < 192) ld_shared_b32(smem + BOX + 64);
        if (thread % 32 == 1 && thread < 192) ld_shared_b32(smem + BOX + 128);
        if (thread < 224) named_barrier_sync(1, 224);
        if (thread == 200) st_shared_b32(smem + BOX + 128, 1);
        if (thread == 224) st_shared_b32(smem + BOX + 64, 1);  // FAULT write_over_many_readers
    }
    if (fault == 56 && thread < 128) {
        wgmma_fence();
        wgmma_m64n16k16_bf16_ss<0, 0>(d, a, b, false);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_fence();
        if (thread == 69) d[1][2] *= 2.0f;
        if (thread == 69) d[1][3] += 1.0f;
        wgmma_m64n16k16_bf16_ss<0, 0>(d, a, b, true);  // FAULT accumulator_written_after_fence
        wgmma_wait<0>();
    }
    if (fault == 57 && thread < 128) {
        u32 fragment[4] = {0, 0, 0, 0};
        for (int i = 0; i < 2; ++i) {
            fragment[1] = thread;
            wgmma_fence();
            if (thread == 69) fragment[2] = i;
            wgmma_m64n16k16_bf16_rs<0>(d, fragment, b, false);  // FAULT fragment_written_after_fence
            wgmma_commit();
            wgmma_wait<0>();
        }
    }
    if (fault == 58) {
        if (thread < 64) named_barrier_sync(1, 64);
        if (thread >= 192) named_barrier_sync(1, 64);  // FAULT named_for_two_purposes
    }
    if (fault == 59) {
        if (thread == 3) mbarrier_arrive(one);
        if (thread == 35) mbarrier_arrive(one);  // FAULT arrival_for_another_phase
    }
    if (fault == 60) {
        if (thread == 3) mbarrier_arrive(one);
        if (thread == 3) mbarrier_arrive(one);
        __syncthreads();
        if (thread == 35) mbarrier_wait(one, 0);  // FAULT two_phases_late
    }
    if (fault == 61) {
        if (thread < 128) wgmma_fence();
        if (thread < 128) wgmma_commit();
        if (thread >= 128 && thread < 192) wgmma_m64n16k16_bf16_ss<0, 0>(d, a, b, false);
        if (thread >= 192) wgmma_wait<0>();
        if (thread >= 192) __syncwarp();
        if (thread >= 192) wgmma_m64n16k16_bf16_ss<0, 0>(d, a, b, true);  // FAULT product_by_two_branches
    }
    if (fault == 64) {
        if (thread == 35) bulk_load(smem + BOX + 8, params.rows, 1024, one);  // FAULT bulk_load_misaligned
    }
    if (fault == 65) {
        if (thread == 35) bulk_load(smem + BOX, params.rows + 1, 1024, one);  // FAULT bulk_load_from_misaligned
    }
    if (fault == 66) {
        if (thread == 35) bulk_load(smem + BOX, params.rows, 1000, one);  // FAULT bulk_load_of_odd_bytes
    }
    if (fault == 67) {
        if (thread == 35) bulk_load(smem + BOX, params.rows, 0, one);  // FAULT bulk_load_of_nothing
    }
    if (fault == 68) {
        if (thread == 35) bulk_load(smem + SHARED_BYTES - 512, params.rows, 1024, one);  // FAULT bulk_load_past_end
    }
    if (fault == 69) {
        if (thread == 35) mbarrier_arrive_expect_tx(one, 1024);
        if (thread == 35) bulk_load(smem + BOX, params.rows + 260, 1024, one);  // FAULT bulk_load_past_tensor
        if (thread == 35) mbarrier_wait(one, 0);
    }
    if (fault == 70) {
        if (thread == 35) mbarrier_init(fresh, 1);
        if (thread == 35) bulk_load(smem + BOX, params.rows, 16, fresh);  // FAULT bulk_load_without_init_fence
    }
    if (fault == 71) {
        if (thread == 35) mbarrier_arrive_expect_tx(one, 48);
        if (thread == 35) bulk_load(smem + BOX + 16, params.rows, 48, one);
        __syncthreads();
        if (thread == 70) ld_shared_b32(smem + BOX + 12);
        if (thread == 70) ld_shared_b32(smem + BOX + 64);
        if (thread == 70) ld_shared_b32(smem + BOX + 60);  // FAULT bulk_load_not_waited_for
    }
    if (fault == 72) {
        if (thread == 35) bulk_load(smem + BOX, params.rows, 48, one);
        if (thread == 35) mbarrier_arrive(one);
        if (thread == 35) mbarrier_wait(one, 0);
        if (thread == 35) ld_shared_b32(smem + BOX);  // FAULT bulk_load_not_announced
    }
    if (fault == 73) {
        if (thread == 3) ld_shared_b32(smem + BOX + 44);
        if (thread == 35) mbarrier_arrive_expect_tx(one, 48);
        if (thread == 35) bulk_load(smem + BOX, params.rows, 48, one);  // FAULT bulk_load_over_read
    }
    if (fault == 74) {
        if (thread == 3) ld_shared_b32(smem + BOX + 44);
        __syncthreads();
        if (thread == 35) mbarrier_arrive_expect_tx(one, 48);
        if (thread == 35) bulk_load(smem + BOX, params.rows, 48, one);  // FAULT bulk_load_over_read_unfenced
    }
    if (fault == 75) {
        if (thread == 35) bulk_add_f32(params.sum, smem + BOX + 4, 16);  // FAULT bulk_add_from_misaligned
    }
    if (fault == 76) {
        if (thread == 35) bulk_add_f32(params.sum + 2, smem + BOX, 16);  // FAULT bulk_add_misaligned
    }
    if (fault == 77) {
        if (thread == 35) bulk_add_f32(params.sum + 508, smem + BOX, 32);  // FAULT bulk_add_past_tensor
    }
    if (fault == 78) {
        if (thread == 35) bulk_add_f32(params.fixed, smem + BOX, 16);  // FAULT bulk_add_to_read_only
    }
    if (fault == 79) {
        if (thread == 35) bulk_add_f32(params.sum, smem + UNWRITTEN - 16, 32);  // FAULT bulk_add_of_unwritten
    }
    if (fault == 80) {
        if (thread == 35) st_shared_b32(smem + BOX + 12, 0);
        if (thread == 35) bulk_add_f32(params.sum, smem + BOX, 16);  // FAULT bulk_add_without_fence
    }
    if (fault == 81) {
        if (thread == 70) st_shared_b32(smem + BOX + 12, 0);
        __syncthreads();
        if (thread == 70) fence_proxy_async();
        if (thread == 135) bulk_add_f32(params.sum, smem + BOX, 16);  // FAULT bulk_add_after_late_fence
    }
    if (fault == 82) {
        if (thread == 3) st_shared_b32(smem + BOX + 12, 0);
        if (thread == 3) fence_proxy_async();
        if (thread == 35) bulk_add_f32(params.sum, smem + BOX, 16);  // FAULT bulk_add_unordered
    }
    if (fault == 83) {
        if (thread == 35) bulk_add_f32(params.sum, smem + BOX, 16);
        if (thread == 35) tma_store_commit();
        if (thread == 35) st_shared_b32(smem + BOX + 12, 0);  // FAULT bulk_add_source_overwritten
    }
    if (fault == 84) {
        if (thread == 35) {
            bulk_add_f32(params.sum, smem + BOX, 16);
            tma_store_commit();
            bulk_add_f32(params.sum + 4, smem + BOX + 16, 16);
            tma_store_commit();
            tma_store_wait<1>();
            st_shared_b32(smem + BOX, 0);
            st_shared_b32(smem + BOX + 16, 0);  // FAULT bulk_add_wait_for_too_few
        }
    }
    if (fault == 85) {
        // The wait of another thread is for groups of its own.
        if (thread == 35) bulk_add_f32(params.sum, smem + BOX, 16);
        if (thread == 35) tma_store_commit();
        if (thread == 36) tma_store_wait<0>();
        __syncthreads();
        if (thread == 36) st_shared_b32(smem + BOX, 0);  // FAULT bulk_add_waited_for_by_another
    }
    if (fault == 86) {
        if (thread == 35) turn_pass(reinterpret_cast<u32*>(params.fixed));  // FAULT turn_of_read_only
    }
    if (fault == 87) {
        const u32* nowhere = reinterpret_cast<const u32*>(params.no_map);
        if (thread == 35) turn_await(nowhere, 0);  // FAULT turn_out_of_bounds
    }
    if (fault == 88) {
        float pair[2];
        if (thread == 35) ld_shared_f32x2(pair, smem + BOX + 4);  // FAULT pair_misaligned
    }
    if (fault == 89) {
        if (thread == 3) st_shared_b32(smem + BOX + 4, 0);
        const bool first = thread / 32 == 1;
        if (first) ld_shared_b32_by_first_lane(smem + BOX + 4);  // FAULT first_lane_reads
    }
    if (fault == 90 && thread < 128) {
        wgmma_fence();
        wgmma_m64n16k16_bf16_ss_new<0, 0>(d, a, b);  // FAULT new_accumulator_written
        wgmma_commit();
        if (thread == 5) d[1][2] = 1.0f;
        wgmma_wait<0>();
    }
}
