// Bulk copies of consecutive bytes (PTX ISA, "cp.async.bulk", "cp.reduce.async.bulk"): to the copy engine, boxes of one
// row of float32 numbers without a swizzle.

namespace emu {

static TensorCopy decode_bulk(Fiber& self, const void* global, u32 shared, u32 bytes, const char* name, int line) {
    if ((u64)global % 16 || shared % 16 || bytes % 16 || bytes == 0)
        fault(
            self, line,
            "%s: %u bytes between %p and shared byte %d; the addresses must be multiples of 16 bytes, and so must the "
            "number of bytes, which is at least 16.",
            name, bytes, global, (int)(shared - SHARED_BASE));
    const u32 offset = shared - SHARED_BASE, size = self.block->launch->shared_bytes;
    if (offset >= size || size - offset < bytes)
        fault(self, line, "%s: %u bytes at shared byte %d, out of bounds: the block has %u.", name, bytes, (int)offset,
              size);
    TensorCopy copy = {};
    copy.address = (u64)global;
    copy.element_bytes = 4;
    for (u32 i = 0; i < MOST_DIMS; i++) copy.sizes[i] = copy.box[i] = 1;
    copy.sizes[0] = copy.box[0] = bytes / 4;
    copy.rows = 1;
    copy.row_bytes = bytes;
    copy.offset = offset;
    copy.issuer = &self;
    copy.line = line;
    return copy;
}

static void add_floats(u8* to, const u8* from, u32 bytes) {
    for (u32 i = 0; i < bytes; i += 4) {
        float value;
        memcpy(&value, from + i, 4);
        atomic_add((float*)(to + i), value);
    }
}

}  // namespace emu

static inline void bulk_load(u32 dst, const void* src, u32 bytes, u32 barrier, int line = __builtin_LINE()) {
    emu::Fiber& self = *emu::current;
    emu::queue_load(self, emu::decode_bulk(self, src, dst, bytes, "bulk_load", line), barrier, line);
}

static inline void bulk_add_f32(float* dst, u32 src, u32 bytes, int line = __builtin_LINE()) {
    emu::Fiber& self = *emu::current;
    emu::TensorCopy copy = emu::decode_bulk(self, dst, src, bytes, "bulk_add_f32", line);
    copy.put = emu::add_floats;
    emu::queue_store(self, copy, line);
}
