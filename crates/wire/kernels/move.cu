// Moves the strided pieces of a transfer for all its pairs of slots. Nothing is expanded beforehand: a group of lanes takes a
// unit, works out which bytes of which piece for which pair of slots that is, and copies them. src/cuda/expand.rs is the same
// arithmetic in Rust, and makes the structures below.
//
// For one pair of slots a piece is a stream of words, run after run. A unit is UNIT_BYTES of that stream. The units of a set
// are numbered pair by pair, within a pair piece by piece; the sets follow each other.
//
// A warp takes a tile of units at a time: first the one of its own number, then whichever is next. When the link is full it
// does not serve all multiprocessors alike, so with equal shares some blocks would end long before the others (measured: 32
// blocks made 280 GB/s where 24 made 357).
//
// The block that ends last writes the job's number to host memory, behind everything that the job has written, on whatever
// device: whoever reads the number there may tell others of it.

typedef unsigned int u32;
typedef unsigned long long u64;

#define UNIT_BYTES 512u
#define LANES 8u
#define GROUPS (32u / LANES)
#define IN_FLIGHT 4u
#define NEAR_ENTRIES 1024u // whose first units a block keeps in shared memory, where they are searched
#define INLINE_BYTES 768u
#define CHUNKS 8u

// A division by a constant, of numbers below 2^31. A multiplier of 0 divides by 1.
struct Divisor {
    u32 value, multiplier, shift, unused;
};

// One piece: where its first run lies in slot 0 of both sides, and how far apart slots and runs are.
struct Entry {
    u64 from, to;
    u64 from_slot, to_slot;
    u64 from_outer, to_outer;
    u64 from_inner, to_inner;
    Divisor run_words; // words of one run
    Divisor inner;     // runs of the inner loop
    u32 words;         // words of the piece, for one pair of slots
    u32 width_log2;    // bytes of a word
    u32 unused[2];
};

// Pieces that move for the same pairs of slots.
struct Set {
    Divisor pair_units; // units of one pair of slots
    u32 first_unit, first_entry, entries, first_pair;
};

struct Pair {
    u32 from, to;
};

// Units first .. first + count. Where a slab takes the place of one side, they lie in its chunks of 2^chunk_shift units: so many
// of them, UNIT_BYTES each, in the first of `chunks`, then those of the next.
struct Job {
    const Entry *entries;
    const u32 *starts; // first unit of each entry, from the first of its set
    const Set *sets;   // null: sets and pairs of a small request are here, and `pairs` is their offset
    u64 pairs;
    u64 slab;
    u32 set_count, first, count, mode;
    u32 *progress; // tiles taken beyond the first of each warp, and blocks that have ended, zero before and after; a job to stop
    u64 *done;     // where its number is written when all is copied
    u64 number;
    u32 tile;      // units of a tile, a multiple of the groups of a warp
    u32 entry_count;
    u32 chunk_shift;
    u32 chunks[CHUNKS];
    u32 unused;
    alignas(8) unsigned char here[INLINE_BYTES];
};

#define MODE_DIRECT 0u
#define MODE_GATHER 1u
#define MODE_SCATTER 2u

static __device__ __forceinline__ u32 divide(u32 number, const Divisor &by) {
    return by.multiplier == 0 ? number : __umulhi(number, by.multiplier) >> by.shift;
}

// Copies the words first .. first + count of the piece's stream, `Lanes` lanes at a time. Loads are in flight together.
template <typename Word, u32 Lanes>
static __device__ __forceinline__ void copy(const Entry &entry, u64 from, u64 to, u64 slab, u32 mode, u32 first, u32 count,
                                            u32 lane) {
    for (u32 base = lane; base < count; base += Lanes * IN_FLIGHT) {
        Word words[IN_FLIGHT];
        u64 targets[IN_FLIGHT];
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; i++) {
            const u32 word = base + i * Lanes;
            if (word < count) {
                const u32 run = divide(first + word, entry.run_words);
                const u64 within = (u64)(first + word - run * entry.run_words.value) * sizeof(Word);
                const u32 outer = divide(run, entry.inner);
                const u32 inner = run - outer * entry.inner.value;
                const u64 in_slab = slab + (u64)word * sizeof(Word);
                u64 source = from + outer * entry.from_outer + inner * entry.from_inner + within;
                targets[i] = to + outer * entry.to_outer + inner * entry.to_inner + within;
                if (mode == MODE_GATHER) targets[i] = in_slab;
                if (mode == MODE_SCATTER) source = in_slab;
                words[i] = __ldcs((const Word *)source);
            }
        }
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; i++) {
            if (base + i * Lanes < count) __stcs((Word *)targets[i], words[i]);
        }
    }
}

// The same, in the words of the entry.
template <u32 Lanes>
static __device__ __forceinline__ void copy_units(const Job &job, const Entry &entry, const Pair &pair, u32 nth, u32 in_entry,
                                                  u32 units, u32 lane) {
    const u64 from = entry.from + pair.from * entry.from_slot;
    const u64 to = entry.to + pair.to * entry.to_slot;
    const u64 in_slab = ((u64)job.chunks[nth >> job.chunk_shift] << job.chunk_shift) + (nth & ((1u << job.chunk_shift) - 1));
    const u64 slab = job.slab + in_slab * UNIT_BYTES;
    const u32 unit_words = UNIT_BYTES >> entry.width_log2;
    const u32 first = in_entry * unit_words;
    const u32 count = min(units * unit_words, entry.words - first);
    switch (entry.width_log2) {
    case 4: copy<uint4, Lanes>(entry, from, to, slab, job.mode, first, count, lane); break;
    case 3: copy<uint2, Lanes>(entry, from, to, slab, job.mode, first, count, lane); break;
    case 2: copy<u32, Lanes>(entry, from, to, slab, job.mode, first, count, lane); break;
    default: copy<unsigned char, Lanes>(entry, from, to, slab, job.mode, first, count, lane); break;
    }
}

// Copies units of the job from nth on, by a warp, and returns how many: if GROUPS of them are of one stretch of one stream all that
// follow there before `end`, which are looked up once, else GROUPS.
static __device__ __forceinline__ u32 move_units(const Job &job, const Set *sets, const Pair *pairs, const u32 *starts, u32 nth,
                                                  u32 end, u32 in_warp) {
    const u32 group = in_warp / LANES;
    const bool active = nth + group < end;
    const u32 unit = job.first + nth + (active ? group : 0);
    // The last set that starts at or before the unit.
    u32 set_index = 0, beyond = job.set_count;
    while (beyond - set_index > 1) {
        const u32 middle = (set_index + beyond) / 2;
        if (sets[middle].first_unit <= unit) set_index = middle;
        else beyond = middle;
    }
    const Set set = sets[set_index];
    const u32 in_set = unit - set.first_unit;
    const u32 pair_index = divide(in_set, set.pair_units);
    const u32 in_pair = in_set - pair_index * set.pair_units.value;

    // The last entry that starts at or before the unit.
    u32 low = set.first_entry, high = set.first_entry + set.entries;
    while (high - low > 1) {
        const u32 middle = (low + high) / 2;
        if (starts[middle] <= in_pair) low = middle;
        else high = middle;
    }
    const u32 in_entry = in_pair - starts[low];
    const u32 pair_place = set.first_pair + pair_index;
    const Entry entry = job.entries[low]; // into registers: the stores below could be to anything
    const Pair pair = pairs[pair_place];
    const u32 every = 0xffffffff;
    const u32 first_low = __shfl_sync(every, low, 0), first_pair = __shfl_sync(every, pair_place, 0);
    const u32 first_in_entry = __shfl_sync(every, in_entry, 0);
    if (__all_sync(every, active && low == first_low && pair_place == first_pair)) {
        // Whole warps make longer packets.
        const u32 stream_units = (u32)((((u64)entry.words << entry.width_log2) + UNIT_BYTES - 1) / UNIT_BYTES);
        const u32 chunk_units = (1u << job.chunk_shift) - (nth & ((1u << job.chunk_shift) - 1));
        const u32 units = min(min(end - nth, chunk_units), stream_units - first_in_entry);
        copy_units<32>(job, entry, pair, nth, first_in_entry, units, in_warp);
        return units;
    }
    if (active) copy_units<LANES>(job, entry, pair, nth + group, in_entry, 1, in_warp % LANES);
    return GROUPS;
}

extern "C" __global__ void __launch_bounds__(512, 1) kvferry_move(const __grid_constant__ Job job) {
    const Set *sets = job.sets ? job.sets : (const Set *)job.here;
    const Pair *pairs = job.sets ? (const Pair *)job.pairs : (const Pair *)(job.here + job.pairs);
    __shared__ u32 near[NEAR_ENTRIES];
    const u32 *starts = job.starts;
    if (job.entry_count > 1 && job.entry_count <= NEAR_ENTRIES) {
        for (u32 i = threadIdx.x; i < job.entry_count; i += blockDim.x) near[i] = job.starts[i];
        __syncthreads();
        starts = near;
    }
    const u32 warps = gridDim.x * blockDim.x / 32;
    const u32 in_warp = threadIdx.x % 32;
    const u32 tiles = (job.count + job.tile - 1) / job.tile;
    u32 tile = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    while (tile < tiles) {
        // Asked for ahead, so that it is there when this tile is done.
        u32 next = tiles;
        if (tiles > warps && in_warp == 0) {
            const u32 stopped = *(volatile u32 *)&job.progress[2];
            next = warps + atomicAdd(&job.progress[0], 1);
            if (stopped == (u32)job.number) next = tiles;
        }
        const u32 end = min(job.count, (tile + 1) * job.tile);
        for (u32 nth = tile * job.tile; nth < end;) nth += move_units(job, sets, pairs, starts, nth, end, in_warp);
        tile = __shfl_sync(0xffffffff, next, 0);
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    __threadfence_system(); // behind what the whole block has written
    if (gridDim.x > 1 && atomicAdd(&job.progress[1], 1) < gridDim.x - 1) return;
    // Nobody takes tiles any more: the next launch on the stream finds zeros.
    job.progress[0] = 0;
    job.progress[1] = 0;
    __threadfence_system(); // behind what the other blocks have
    *(volatile u64 *)job.done = job.number;
}
