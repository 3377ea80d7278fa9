// Bulk tensor copies (PTX ISA, "cp.async.bulk.tensor"). The copy engine is an actor of its own: a load lands when
// nobody can run without it (with a seed, now and then earlier), in any order, and only its mbarrier tells; a store
// reads shared memory when its issuer waits for that, or when the block ends. Here a tensor map holds plain numbers,
// which fagen.tensor_map packs:
//   [0] MAGIC  [1] address  [2..6] sizes in elements, innermost first  [7..10] strides of dimensions 1 to 4 in bytes
//   [11] box of dimensions 0 to 3, 16 bits each, and [12] of dimension 4; those beyond the rank have 1, 0 and 1
//   [13] bits 0-7: swizzle 0 none, 1 32 B, 2 64 B, 3 128 B; 8-15: bytes of an element; 16-23: the rank, 4 or 5

struct alignas(64) TensorMap {
    u64 opaque[16];
};

namespace emu {

constexpr u64 MAP_MAGIC = 0x70616d5f6e656761ull;
constexpr u32 MOST_COPIES = 512;  // in flight at a time
constexpr u32 MOST_DIMS = 5;

struct TensorCopy {
    u64 address, sizes[MOST_DIMS], strides[MOST_DIMS];
    u32 box[MOST_DIMS], element_bytes, swizzle;  // swizzle: a mask of the bits that are moved, 0, 1, 3 or 7
    u32 row_bytes, rows;
    int at[MOST_DIMS];
    u32 offset;  // of the box in shared memory
    Fiber* issuer;
    int line;
    u32 mbarrier;                                    // of a load
    u32 group, tick;                                 // of a store
    void (*put)(u8* to, const u8* from, u32 bytes);  // what a store does to global memory
};

struct Engine {
    TensorCopy loads[MOST_COPIES], stores[MOST_COPIES];
    u32 n_loads, n_stores;
};

static TensorCopy decode_copy(Fiber& self, const TensorMap& map, u32 rank, const int (&at)[MOST_DIMS], u32 address,
                              const char* name, int line) {
    const u64* words = map.opaque;
    TensorCopy copy = {};
    if ((u64)&map % 64) fault(self, line, "%s: the tensor map at %p must be aligned to 64 bytes.", name, &map);
    if (words[0] != MAP_MAGIC)
        fault(self, line,
              "%s: this is no tensor map of the emulator (its first word is 0x%llx).\n  Look for a wrong parameter, or "
              "one that was encoded for a GPU.",
              name, words[0]);
    copy.address = words[1];
    copy.element_bytes = words[13] >> 8 & 0xff;
    const u32 swizzle = words[13] & 0xff, map_rank = words[13] >> 16 & 0xff;
    if (map_rank != rank) fault(self, line, "%s_%ud: the tensor map is one of %u dimensions.", name, rank, map_rank);
    copy.strides[0] = copy.element_bytes;
    bool valid = swizzle <= 3 && copy.element_bytes && 16 % copy.element_bytes == 0 && copy.address % 16 == 0;
    copy.rows = 1;
    for (u32 i = 0; i < MOST_DIMS; i++) {
        copy.sizes[i] = words[2 + i];
        copy.box[i] = words[11 + i / 4] >> (16 * (i % 4)) & 0xffff;
        if (i) copy.strides[i] = words[6 + i];
        if (i) copy.rows *= copy.box[i];
        copy.at[i] = at[i];
        valid &= copy.sizes[i] && copy.sizes[i] <= 1ull << 32 && copy.box[i] && copy.box[i] <= 256;
        valid &= i == 0 || (copy.strides[i] % 16 == 0 && copy.strides[i] < 1ull << 40);
    }
    if (!copy.address)
        fault(
            self, line,
            "%s: the tensor has the address 0: an H200 reads nothing there, not even the zeros of a box past its end.",
            name);
    for (u32 i = 0; i < MOST_DIMS; i++)
        if (at[i] < 0)
            fault(self, line,
                  "%s: coordinate %u is %d. A tile begins at or behind the first element: a negative coordinate is an "
                  "illegal instruction on an H200.",
                  name, i, at[i]);
    copy.row_bytes = copy.box[0] * copy.element_bytes;
    copy.swizzle = (1u << swizzle) - 1;
    valid &= copy.row_bytes % 16 == 0;
    if (!valid)
        fault(self, line,
              "%s: a tensor map that a GPU would refuse: address and strides must be multiples of 16 bytes, boxes from "
              "1 to 256 elements a side with rows of a multiple of 16 bytes.",
              name);
    if (swizzle && copy.row_bytes != 16u << swizzle)
        fault(self, line,
              "%s: rows of %u bytes with a swizzle of %u bytes; the emulator knows only rows as wide as the swizzle.",
              name, copy.row_bytes, 16u << swizzle);
    const u32 offset = address - SHARED_BASE, bytes = copy.rows * copy.row_bytes,
              size = self.block->launch->shared_bytes;
    if (offset >= size || size - offset < bytes)
        fault(self, line, "%s: a box of %u bytes at shared byte %d, out of bounds: the block has %u.", name, bytes,
              (int)offset, size);
    if (offset % 128) fault(self, line, "%s: a box at shared byte %u, which must be a multiple of 128.", name, offset);
    copy.offset = offset;
    copy.issuer = &self;
    copy.line = line;
    return copy;
}

// Bits 4 to 6 of the address, xor bits 7 to 9 as far as the mask goes. Offsets count from a multiple of 1024.
static inline u32 swizzled(u32 offset, u32 mask) { return offset ^ (offset >> 7 & mask) << 4; }

static_assert(SHARED_BASE % 1024 == 0, "offsets are swizzled like addresses");

// Moves the box, row by row, 16 bytes at a time: piece(offset in shared memory, global memory, bytes to skip, bytes).
template <class Piece>
static inline void for_pieces(const TensorCopy& copy, bool write, Piece piece) {
    const Fiber& issuer = *copy.issuer;
    Block& block = *issuer.block;
    for (u32 row = 0; row < copy.rows; row++) {
        u64 address = copy.address;  // modulo 2^64, as a GPU computes it
        bool inside = true;
        u32 rest = row;
        for (u32 i = 1; i < MOST_DIMS; i++) {
            const i64 at = (i64)copy.at[i] + rest % copy.box[i];
            rest /= copy.box[i];
            inside &= at >= 0 && at < (i64)copy.sizes[i];
            address += at * copy.strides[i];
        }
        // Elements from first to last of the row lie inside.
        i64 first = copy.at[0] < 0 ? -(i64)copy.at[0] : 0, last = (i64)copy.sizes[0] - copy.at[0];
        if (last > copy.box[0]) last = copy.box[0];
        if (!inside || first >= last) first = last = 0;
        address += (i64)copy.at[0] * copy.element_bytes;
        const u32 from = (u32)first * copy.element_bytes, to = (u32)last * copy.element_bytes;
        if (from < to && (!holds(block.hot_range, address + from, to - from) || (write && !block.hot_range.writable)))
            for (u32 byte = from; byte < to; byte += copy.element_bytes)
                find_range(*copy.issuer, address + byte, copy.element_bytes, write, copy.line);
        for (u32 byte = 0; byte < copy.row_bytes; byte += 16) {
            const u32 offset = swizzled(copy.offset + row * copy.row_bytes + byte, copy.swizzle);
            const u32 low = from > byte ? from - byte : 0, high = to < byte + 16 ? to - byte : 16;
            const bool some = from < byte + 16 && byte < to;
            piece(offset, (u8*)(address + byte), some ? low : 0, some ? high - low : 0);
        }
    }
}

static void land(Block& block, TensorCopy& copy) {
    const u32 mark = BY_ENGINE + block.tick;
    for_pieces(copy, false, [&](u32 offset, const u8* source, u32 skip, u32 bytes) {
        u8* to = block.shared + offset;
        if (bytes < 16) memset(to, 0, 16);
        memcpy(to + skip, source + skip, bytes);
        for (u32 i = 0; i < 4; i++) {
            block.shadow[offset / 4 + i].write_tick = mark;
            block.shadow[offset / 4 + i].writer = (u16)copy.mbarrier;
        }
    });
    complete_bytes(block, block.mbarriers[copy.mbarrier], copy.rows * copy.row_bytes);
}

static bool land_one(Block& block) {
    Engine& engine = *block.engine;
    if (!engine.n_loads) return false;
    const u32 index = block.launch->seed ? draw(block) % engine.n_loads : 0;
    TensorCopy copy = engine.loads[index];
    engine.n_loads--;
    memmove(&engine.loads[index], &engine.loads[index + 1], (engine.n_loads - index) * sizeof copy);
    land(block, copy);
    return true;
}

static void put_bytes(u8* to, const u8* from, u32 bytes) { memcpy(to, from, bytes); }

static void execute_store(const TensorCopy& copy) {
    Block& block = *copy.issuer->block;
    for_pieces(copy, true, [&](u32 offset, u8* to, u32 skip, u32 bytes) {
        copy.put(to + skip, block.shared + offset + skip, bytes);
    });
}

static void finish_copies(Fiber& last) {
    Block& block = *last.block;
    Engine& engine = *block.engine;
    if (engine.n_loads) {
        const TensorCopy& copy = engine.loads[0];
        fault(*copy.issuer, copy.line,
              "the block ends while a tensor copy to shared byte %u is in flight: nobody waited for the mbarrier at "
              "shared byte %u.\n  Look for a missing mbarrier_wait.",
              copy.offset, block.mbarriers[copy.mbarrier].offset);
    }
    for (u32 i = 0; i < block.n_mbarriers; i++) {
        const Mbarrier& barrier = block.mbarriers[i];
        if (barrier.phase_bytes || barrier.landed > barrier.awaited)
            fault(last, barrier.init_line,
                  "the block ends, and nobody waited for the tensor copies of phase %u of the mbarrier at shared byte "
                  "%u.\n  Look for a missing mbarrier_wait.",
                  barrier.phase_bytes ? barrier.phase : barrier.landed - 1, barrier.offset);
    }
    for (u32 i = 0; i < engine.n_stores; i++) execute_store(engine.stores[i]);
    engine.n_stores = 0;
}

static Engine& need_engine(Block& block) {
    need_unit_reads(block);
    if (!block.engine) {
        block.engine = (Engine*)own(block, sizeof(Engine));
        block.land = land_one;
        block.finish = finish_copies;
    }
    return *block.engine;
}

static void queue_load(Fiber& self, TensorCopy copy, u32 address, int line) {
    Block& block = *self.block;
    Engine& engine = need_engine(block);
    Mbarrier& barrier = find_mbarrier(self, address, "copies for", line);
    if (!barrier.fenced)
        fault(self, line,
              "copies for the mbarrier at shared byte %u, which the copy engine may not see initialised.\n  Look for a "
              "missing mbarrier_init_fence() after the mbarrier_init of line %d, in the same thread.",
              barrier.offset, barrier.init_line);
    copy.mbarrier = index_of(block, barrier);
    if (engine.n_loads == MOST_COPIES) fault(self, line, "more than %u tensor copies in flight.", MOST_COPIES);
    for (u32 i = 0; i < copy.rows * copy.row_bytes; i += 4) check_read_before_load(self, (copy.offset + i) / 4, line);
    for (u32 i = 0; i < copy.rows * copy.row_bytes; i += 16) note_write(self, copy.offset + i, 16, LOADING, line);
    engine.loads[engine.n_loads++] = copy;
}

static void queue_store(Fiber& self, TensorCopy copy, int line) {
    Block& block = *self.block;
    Engine& engine = need_engine(block);
    Seen seen = {0, 0};
    // What lies outside the tensor is left out, and need not have been written.
    for_pieces(copy, true, [&](u32 offset, u8*, u32, u32 bytes) {
        if (bytes) unit_read(self, self.clocks, true, offset, block.n_groups, seen, line);
    });
    if (engine.n_stores == MOST_COPIES) fault(self, line, "more than %u tensor copies in flight.", MOST_COPIES);
    copy.group = self.bulk_group;
    copy.tick = block.tick++;
    engine.stores[engine.n_stores++] = copy;
}

static void issue_load(Fiber& self, u32 dst, const TensorMap& map, u32 rank, const int (&at)[MOST_DIMS], u32 address,
                       int line) {
    queue_load(self, decode_copy(self, map, rank, at, dst, "tma_load", line), address, line);
}

static void issue_store(Fiber& self, const TensorMap& map, u32 rank, const int (&at)[MOST_DIMS], u32 src, int line) {
    TensorCopy copy = decode_copy(self, map, rank, at, src, "tma_store", line);
    copy.put = put_bytes;
    queue_store(self, copy, line);
}

static void wait_for_stores(Fiber& self, u32 newest) {
    Block& block = *self.block;
    if (!block.engine) return;
    Engine& engine = *block.engine;
    u32 kept = 0;
    for (u32 i = 0; i < engine.n_stores; i++) {
        const TensorCopy& copy = engine.stores[i];
        if (copy.issuer == &self && copy.group + newest < self.bulk_group) {
            execute_store(copy);
            raise_to(self.clocks[store_clock(block, self.warp->index)], copy.tick + 1);
        } else {
            if (kept != i) engine.stores[kept] = copy;
            kept++;
        }
    }
    engine.n_stores = kept;
}

static void fence_proxy(Fiber& self) { self.fences[self.n_fences++ % FENCES] = self.block->tick++; }

}  // namespace emu

static inline void tma_load_4d(u32 dst, const TensorMap& map, int c0, int c1, int c2, int c3, u32 barrier,
                               int line = __builtin_LINE()) {
    emu::issue_load(*emu::current, dst, map, 4, {c0, c1, c2, c3, 0}, barrier, line);
}

static inline void tma_load_5d(u32 dst, const TensorMap& map, int c0, int c1, int c2, int c3, int c4, u32 barrier,
                               int line = __builtin_LINE()) {
    emu::issue_load(*emu::current, dst, map, 5, {c0, c1, c2, c3, c4}, barrier, line);
}

static inline void tma_store_4d(const TensorMap& map, int c0, int c1, int c2, int c3, u32 src,
                                int line = __builtin_LINE()) {
    emu::issue_store(*emu::current, map, 4, {c0, c1, c2, c3, 0}, src, line);
}

static inline void tma_store_5d(const TensorMap& map, int c0, int c1, int c2, int c3, int c4, u32 src,
                                int line = __builtin_LINE()) {
    emu::issue_store(*emu::current, map, 5, {c0, c1, c2, c3, c4}, src, line);
}

static inline void tma_store_commit() { emu::current->bulk_group++; }

template <int N>
static inline void tma_store_wait_read() {
    emu::wait_for_stores(*emu::current, N);
}

template <int N>
static inline void tma_store_wait() {
    emu::wait_for_stores(*emu::current, N);
}

static inline void fence_proxy_async() { emu::fence_proxy(*emu::current); }
