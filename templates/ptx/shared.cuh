// Shared memory by 32-bit addresses, as ldmatrix and cp.async take them.

__device__ __forceinline__ u32 shared_base() {
    extern __shared__ __align__(1024) unsigned char dynamic_shared[];
    return static_cast<u32>(__cvta_generic_to_shared(dynamic_shared));
}

__device__ __forceinline__ void st_shared_b32(u32 addr, u32 v) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(addr), "r"(v) : "memory");
}

__device__ __forceinline__ void st_shared_b128(u32 addr, const u32 (&v)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
}

__device__ __forceinline__ u32 ld_shared_b32(u32 addr) {
    u32 v;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(addr) : "memory");
    return v;
}

__device__ __forceinline__ float ld_shared_f32(u32 addr) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(addr) : "memory");
    return v;
}

__device__ __forceinline__ void ld_shared_f32x2(float (&v)[2], u32 addr) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v[0]), "=f"(v[1]) : "r"(addr) : "memory");
}

__device__ __forceinline__ void ld_shared_f32x4(float (&v)[4], u32 addr) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                 : "r"(addr)
                 : "memory");
}

__device__ __forceinline__ void ld_shared_b128(u32 (&v)[4], u32 addr) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(addr)
                 : "memory");
}

// The word at `addr` for all lanes of the warp, which its first lane alone reads. To a compiler what a lane reads
// behind a condition differs between lanes, and all that follows from it; here it sees no condition.
__device__ __forceinline__ u32 ld_shared_b32_by_first_lane(u32 addr) {
    u32 v;
    asm volatile(
        "{\n"
        ".reg .pred first;\n"
        ".reg .b32 lane, word;\n"
        "mov.u32 lane, %%laneid;\n"
        "setp.eq.u32 first, lane, 0;\n"
        "mov.b32 word, 0;\n"
        "@first ld.shared.b32 word, [%1];\n"
        "shfl.sync.idx.b32 %0, word, 0, 31, 0xffffffff;\n"
        "}"
        : "=r"(v)
        : "r"(addr)
        : "memory");
    return v;
}
