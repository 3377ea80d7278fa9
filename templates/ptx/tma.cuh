// Bulk tensor copies: boxes between global memory, described by a tensor map, and shared memory, by the copy engine.

// What cuTensorMapEncodeTiled makes; a parameter of the kernel.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

// Starts the copy of the box whose first element has these coordinates to `dst`; its bytes count on `barrier`. Elements
// outside the tensor become zeros, and count.
__device__ __forceinline__ void tma_load_4d(u32 dst, const TensorMap& map, int c0, int c1, int c2, int c3,
                                            u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, "
        "%5}], "
        "[%6];" ::"r"(dst),
        "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void tma_load_5d(u32 dst, const TensorMap& map, int c0, int c1, int c2, int c3, int c4,
                                            u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, "
        "%5, %6}], "
        "[%7];" ::"r"(dst),
        "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(barrier)
        : "memory");
}

// Starts the copy from `src`, which is part of the thread's next bulk group. Elements outside the tensor are left out.
__device__ __forceinline__ void tma_store_4d(const TensorMap& map, int c0, int c1, int c2, int c3, u32 src) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(&map),
                 "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(src)
                 : "memory");
}

__device__ __forceinline__ void tma_store_5d(const TensorMap& map, int c0, int c1, int c2, int c3, int c4, u32 src) {
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(&map),
        "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(src)
        : "memory");
}

__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Returns when all but the newest N bulk groups of the calling thread have read their shared memory.
template <int N>
__device__ __forceinline__ void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// Returns when they have written all too.
template <int N>
__device__ __forceinline__ void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

// Orders the calling thread's ordinary accesses to shared memory before those of the copy engine and of wgmma that a
// barrier lets follow.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
