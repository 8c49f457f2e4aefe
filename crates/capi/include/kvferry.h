/* The C interface of kvferry: see README.md for how to build it, examples/c for how to use it.
 *
 * - A handle is one that a function here has written, and has not been freed. NULL is refused, and freeing it does nothing. Handles
 *   may be used by any thread, by several at a time; but what is freed, nobody uses meanwhile.
 * - Text is UTF-8 that ends in a NUL. An array has the length that is given with it; one of length 0 may be NULL. Both have to last
 *   for the call only.
 * - What a call writes is there after KVF_OK. After anything but KVF_OK and KVF_PENDING, kvf_last_error says what went wrong.
 * - A handle is of no use in a process that was forked off the one that made it: calls end with KVF_FORKED, and freeing it does
 *   nothing. Nor can such a process start an engine or an agent if there had been one when it was forked off.
 */

#ifndef KVFERRY_H
#define KVFERRY_H

/* Made of the library's source by crates/capi/tests/header.rs. Do not edit. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Grows by one whenever a program that was compiled with an older header would not work any more.
#define KVF_ABI_VERSION 1

// How a call has ended. Others may be added.
enum kvf_status
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // Well.
  KVF_OK = 0,
  // Nothing is wrong: what was asked after has not happened yet.
  KVF_PENDING = 1,
  // An argument is NULL, no UTF-8, or not what it should be.
  KVF_ARGUMENT = 2,
  // No UCX, or one that refuses its settings: see kvf_doctor.
  KVF_START = 3,
  // A page table cannot be built, read or used.
  KVF_TABLE = 4,
  // Memory could not be allocated or registered, or an access is outside of it.
  KVF_REGION = 5,
  // A page table was not published.
  KVF_PUBLISH = 6,
  // The bytes are no card, or the cards no instance.
  KVF_CARD = 7,
  // The instances were not connected.
  KVF_CONNECT = 8,
  // A request or a transfer was not taken up. Nothing was sent.
  KVF_POST = 9,
  // A part was not taken up; the send goes on.
  KVF_PUSH = 10,
  // A request or a transfer failed: what was to be written is to be taken for unwritten.
  KVF_FAILED = 11,
  // It was cancelled on this side.
  KVF_CANCELLED = 12,
  // There will be no word that slots can be used again: it was given before, or the engine has stopped first.
  KVF_NOT_QUIET = 13,
  // A remote agent is not known, or cannot be reached.
  KVF_REMOTE = 14,
  // A list or a transfer cannot be prepared: an entry is in no registered memory, or does not pair.
  KVF_PREPARE = 15,
  // Metadata was not exchanged.
  KVF_EXCHANGE = 16,
  // A bug of the library's.
  KVF_PANIC = 17,
  // Two instances cannot serve each other, or there are no such tokens.
  KVF_MATCH = 18,
  // The handle was made in the process that this one was forked off, or there had been an engine or an agent: fork before there
  // is any.
  KVF_FORKED = 19,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum kvf_status kvf_status;
#else
typedef int32_t kvf_status;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// A named agent. Freed by kvf_agent_free.
typedef struct kvf_agent kvf_agent;

// One rank's engine. Freed by kvf_engine_free.
typedef struct kvf_engine kvf_engine;

// All ranks of one instance. Freed by kvf_instance_free.
typedef struct kvf_instance kvf_instance;

// One pair of connected instances. Freed by kvf_link_free, which does not disconnect.
typedef struct kvf_link kvf_link;

// A prepared list of runs of memory, local or remote. Freed by kvf_list_free.
typedef struct kvf_list kvf_list;

// Memory that is registered with an agent. Freed by kvf_memory_free, which does not deregister it.
typedef struct kvf_memory kvf_memory;

// A transfer of an agent's. Freed by kvf_move_free.
typedef struct kvf_move kvf_move;

// What peers have said. Freed by kvf_notifications_free.
typedef struct kvf_notifications kvf_notifications;

// Who sends what to whom. Freed by kvf_plan_free.
typedef struct kvf_plan kvf_plan;

// Registered memory. Freed by kvf_region_free; what still uses it keeps it registered.
typedef struct kvf_region kvf_region;

// Says when a part may be read. Freed by kvf_signal_set.
typedef struct kvf_signal kvf_signal;

// One rank's description of its pools. Freed by kvf_table_free.
typedef struct kvf_table kvf_table;

// A send or a receive. Freed by kvf_transfer_free, which stops nothing.
typedef struct kvf_transfer kvf_transfer;

// Bytes of the library's. Freed by kvf_bytes_free.
typedef struct {
  // The bytes, with a NUL behind the last.
  uint8_t *data;
  // How many, the NUL left out.
  size_t length;
} kvf_bytes;

// How an agent is set up. Zeroed, everything but the name is at its default.
typedef struct {
  // Its name.
  const char *name;
  // Where to listen for peers that exchange metadata: "0.0.0.0:5555", port 0 for any; NULL: not at all.
  const char *listen;
  // Transports that UCX may use, as in UCX_TLS; NULL leaves the choice to UCX.
  const char *transports;
  // Whether there is memory of a GPU.
  bool on_gpu;
  // Which GPU, as this process counts them.
  uint32_t device;
  // How long a peer that is asked for something may show no sign of life; 0: the default.
  uint64_t patience_ms;
  // How long a transfer may take in all; 0: as long as it moves.
  uint64_t transfer_deadline_ms;
} kvf_agent_options;

// Says that registered memory is not used any more, neither by this process nor for a request of any other's. Called once, by
// any thread, with the context that was given. It must not call the library, and not take long. Not called if the memory was not
// registered: then it is the caller's still; nor for memory that a peer may still write when the agent is freed: see
// kvf_agent_free.
typedef void (*kvf_released)(void *context);

// Bytes of the caller's.
typedef struct {
  // The first.
  const uint8_t *data;
  // How many.
  size_t length;
} kvf_slice;

// The slots of a request's blocks in one group of a page table.
typedef struct {
  // Ordinal of the block that the first slot is of.
  uint64_t first;
  // The slots, in the order of blocks; -1 for a block that is not there.
  const int64_t *slots;
  // How many.
  size_t count;
} kvf_block_map;

// Some memory, in the address space of the process that it is in.
typedef struct {
  // First byte.
  uint64_t address;
  // Length.
  uint64_t bytes;
} kvf_run;

// What an instance chooses for itself. Zeroed, everything but the first three is at its default.
typedef struct {
  // Tokens of a block.
  uint32_t tokens_per_block;
  // Slots of each pool of blocks.
  uint32_t slot_count;
  // Element type: f32, f16, bf16, fp8_e4m3, fp8_e5m2, fp4_e2m1 or u8.
  const char *dtype;
  // Slots of each pool of state; 0: as many as of blocks.
  uint32_t state_slot_count;
  // Whether the last stage holds the model's MTP layers too.
  bool mtp;
  // Whether the pools are in memory of a GPU.
  bool on_gpu;
  // Which GPU, as this process counts them.
  uint32_t device;
  // Element type of indexer keys; NULL: fp8_e4m3.
  const char *indexer_dtype;
  // Element type of recurrent state where the model does not say it; NULL: the model's own.
  const char *ssm_dtype;
  // block_major (NULL), layer_together, layer_stacked or layer_split.
  const char *pooling;
  // hnd (NULL) or nhd.
  const char *cells;
  // hnd (NULL) or nhd.
  const char *state_cells;
} kvf_table_options;

// One way that bytes took to or from a peer of a request.
typedef struct {
  // direct, landing, staged or runs. Lasts for ever.
  const char *route;
  // Why that way, in words. Lasts for ever.
  const char *reason;
  // Bytes.
  uint64_t bytes;
  // Contiguous runs.
  uint64_t runs;
  // On the wire, in nanoseconds.
  uint64_t elapsed_ns;
} kvf_way;

// Where the time of a request with one peer went, in nanoseconds.
typedef struct {
  // In the call that posted it.
  uint64_t posting_ns;
  // From then on, until it was known where to write to, or the first bytes came.
  uint64_t queued_ns;
  // From the end of the last write until both sides had agreed.
  uint64_t settling_ns;
  // From the post to the end.
  uint64_t total_ns;
} kvf_peer_times;

// How the last post of an agent's transfer went.
typedef struct {
  // When it was posted: microseconds of Unix time.
  uint64_t started_us;
  // How long the call that posted it took, in nanoseconds.
  uint64_t posting_ns;
  // From the post until it was known to have ended, in nanoseconds.
  uint64_t total_ns;
  // Bytes moved.
  uint64_t bytes;
  // Entries paired.
  uint64_t entries;
  // The way that they took, as in kvf_way; NULL if the peer was asked to push them, or they went in a message.
  const char *route;
  // Why that way, in words; NULL with the route. Lasts for ever.
  const char *reason;
} kvf_move_times;

// Called when something has happened, by any thread, with the context that was given. It must not call the library, and not
// take long: it is one of the engine's threads that calls.
typedef void (*kvf_callback)(void *context);

// What moved to or from one peer of a request that has ended well.
typedef struct {
  // Its rank.
  uint32_t rank;
  // (layer, role) rows, whole or in part.
  uint64_t rows;
  // Bytes, by this rank's own count.
  uint64_t bytes;
  // Of a send, the time on the wire; of a receive, from the post to the source's report. In nanoseconds.
  uint64_t elapsed_ns;
} kvf_peer;

// A part of a send that was posted in parts. Zeroed but for the tokens, it has all layers.
typedef struct {
  // Its first token. Parts follow each other.
  uint64_t first_token;
  // The token after its last. The part that ends where the request ends is the last.
  uint64_t end_token;
  // The first of the model's layers that it has.
  uint32_t first_layer;
  // The layer after the last; 0: it has all layers.
  uint32_t end_layer;
  // Block maps, if blocks have been added since the send was posted.
  const kvf_block_map *maps;
  // How many; 0: those that the send was posted with.
  size_t map_count;
  // A few bytes for the destination, of the last part only.
  kvf_slice note;
} kvf_part;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The `KVF_ABI_VERSION` of the library. A program compares it with its header's before anything else.
uint32_t kvf_abi_version(void);

// Version of the library, as text. Lasts for ever.
const char *kvf_version(void);

// Looks at this machine, for people: which UCX there is, which routes work, what could be better. Takes up to a few seconds.
kvf_status kvf_doctor(kvf_bytes *report);

// Starts an agent.
//
// # Safety
//
// The contract of the crate.
kvf_status kvf_agent_start(const kvf_agent_options *options, kvf_agent **agent);

// The port that the agent listens at. 0 if it does not.
uint16_t kvf_agent_port(const kvf_agent *agent);

// Registers memory of the caller's: `bytes` from `base` on, of the host or of the agent's GPU. It has to stay until `released`
// is called, which may be NULL if the memory stays for ever. It is called only if this returns KVF_OK.
//
// # Safety
//
// The contract of the crate.
kvf_status kvf_agent_register(const kvf_agent *agent,
                              uint64_t base,
                              uint64_t bytes,
                              bool on_gpu,
                              kvf_released released,
                              void *context,
                              kvf_memory **memory);

// Allocates and registers zeroed memory, of the host or of the agent's GPU. Peers on this host can map it, which makes it the
// fastest to write to. It is freed when it has been deregistered.
kvf_status kvf_agent_allocate(const kvf_agent *agent,
                              uint64_t bytes,
                              bool on_gpu,
                              kvf_memory **memory);

// First address, of the host or of the GPU. 0 for NULL.
uint64_t kvf_memory_base(const kvf_memory *memory);

// Undoes a registration, and waits for what uses the memory, `timeout_ms` at most. After KVF_OK nothing reads or writes it any
// more. After anything else it takes part in nothing new, and this can be called again to wait on.
kvf_status kvf_agent_deregister(const kvf_agent *agent,
                                const kvf_memory *memory,
                                uint64_t timeout_ms);

// Frees the handle of a registration, which stays.
void kvf_memory_free(kvf_memory *memory);

// All that a peer needs: where the agent is, and all of its memory.
kvf_status kvf_agent_metadata(const kvf_agent *agent, kvf_bytes *metadata);

// Takes in a remote agent's metadata. Its name is written to `name` if that is not NULL. A new life of an agent that is known
// replaces it.
//
// # Safety
//
// The contract of the crate.
kvf_status kvf_agent_add_remote(const kvf_agent *agent,
                                kvf_slice metadata,
                                kvf_bytes *name);

// Asks the agent that listens at `at` ("host:port") for its metadata and takes it in, as kvf_agent_add_remote does.
//
// # Safety
//
// The contract of the crate.
kvf_status kvf_agent_fetch_remote(const kvf_agent *agent, const char *at, uint64_t timeout_ms, kvf_bytes *name);

// Gives this agent's metadata to the one that listens at `at`.
//
// # Safety
//
// The contract of the crate.
kvf_status kvf_agent_send_metadata(const kvf_agent *agent, const char *at, uint64_t timeout_ms);

// Gives up what is under way with a remote agent and closes the connection to it.
//
// # Safety
//
// The contract of the crate.
kvf_status kvf_agent_remove_remote(const kvf_agent *agent, const char *name);

// Says something to a remote agent. It is not ordered against transfers.
//
// # Safety
//
// The contract of the crate.
kvf_status kvf_agent_notify(const kvf_agent *agent, const char *name, kvf_slice message);

// What peers have said since the last call. Waits for the first, `timeout_ms` at most; there may be none.
kvf_status kvf_agent_notifications(const kvf_agent *agent, uint64_t timeout_ms, kvf_notifications **notifications);

// How many there are. 0 for NULL.
size_t kvf_notifications_count(const kvf_notifications *notifications);

// Who said the one with this index, and what. Both last as long as `notifications`.
kvf_status kvf_notifications_at(const kvf_notifications *notifications,
                                size_t index,
                                const char **from,
                                kvf_slice *message);

// Frees notifications.
void kvf_notifications_free(kvf_notifications *notifications);

// Gives up what is under way, takes leave of the peers, stops the threads, and frees an agent. Waits for that. Memory that a peer
// was asked to write and may still write then stays registered until the process ends: it is not said to be released.
void kvf_agent_free(kvf_agent *agent);

// Frees what a function has written to a kvf_bytes.
void kvf_bytes_free(kvf_bytes bytes);

// Makes an instance of the cards of its ranks 0 to `count - 1`, in any order.
//
// # Safety
//
// The contract of the crate.
kvf_status kvf_instance_new(const kvf_slice *cards, size_t count, kvf_instance **instance);

// Reads what kvf_instance_to_bytes has written.
//
// # Safety
//
// The contract of the crate.
kvf_status kvf_instance_from_bytes(kvf_slice bytes, kvf_instance **instance);

// The instance as bytes, for the ranks of both instances.
kvf_status kvf_instance_to_bytes(const kvf_instance *instance, kvf_bytes *bytes);

// Frees an instance.
void kvf_instance_free(kvf_instance *instance);

// Starts an engine.
//
// - `options`: JSON with the keys of the library's EngineOptions ("rank", "instance", "transports", "route", "patience_ms", ..);
//   what is not given is at its default. NULL: all.
// - `gpu`: for pools in memory of a GPU, JSON with the keys of the library's CudaOptions ("device", and what is to be other than its
//   default); NULL for none.
//
// # Safety
//
// The contract of the crate.
kvf_status kvf_engine_start(const char *options,
                            const char *gpu,
                            kvf_engine **engine);

// Allocates zeroed memory for each pool of `table`, writes its address into the table, and a region to each place of `regions`,
// of which there must be kvf_table_pools. Peers on this host can map such memory.
//
// # Safety
//
// The contract of the crate.
kvf_status kvf_engine_allocate(const kvf_engine *engine,
                               const kvf_table *table,
                               kvf_region **regions,
                               size_t count);

// Registers memory of the caller's: `bytes` from `base` on, of the host or of the engine's GPU. It has to stay until `released`
// is called, which may be NULL if the memory stays for ever. It is called only if this returns KVF_OK.
//
// # Safety
//
// The contract of the crate.
kvf_status kvf_engine_register(const kvf_engine *engine,
                               uint64_t base,
                               uint64_t bytes,
                               bool on_gpu,
                               kvf_released released,
                               void *context,
                               kvf_region **region);

// Offers this rank's pools to its peers: pool i of `table` lies in `regions[i]`. Once in the engine's life.
//
// # Safety
//
// The contract of the crate.
kvf_status kvf_engine_publish(const kvf_engine *engine,
                              const kvf_table *table,
                              const kvf_region *const *regions,
                              size_t count);

// This rank's card, once it has published a table: with those of the other ranks it makes a kvf_instance.
kvf_status kvf_engine_card(const kvf_engine *engine, kvf_bytes *card);

// Connects two instances, of one of which this engine is a rank. Every rank of both makes this call with the same cards, at the
// same time: it waits for the others, up to the engine's patience.
kvf_status kvf_engine_connect(const kvf_engine *engine,
                              const kvf_instance *sources,
                              const kvf_instance *destinations,
                              kvf_link **link);

// Forgets a link and tells its peers. Refused while a request of it is under way.
kvf_status kvf_engine_disconnect(const kvf_engine *engine, const kvf_link *link);

// Asks the sources of `links` for the tokens `first_token` to `end_token - 1` of a request: of several links, the first whose
// sources send it. `maps`: one a group of this rank's table. The slots are exposed until kvf_transfer_quiet says otherwise.
//
// Each rank of this rank's instance chooses by itself: where there are several, only one group of sources may send an attempt.
//
// # Safety
//
// The contract of the crate.
kvf_status kvf_engine_receive(const kvf_engine *engine,
                              const kvf_link *const *links,
                              size_t link_count,
                              uint64_t request,
                              uint32_t attempt,
                              const kvf_block_map *maps,
                              size_t map_count,
                              uint64_t first_token,
                              uint64_t end_token,
                              kvf_transfer **receive);

// Writes the tokens `first_token` to `end_token - 1` of a request to each destination of `link` that this rank serves, as soon
// as it has said where to. `in_parts`: nothing leaves before it is pushed, by kvf_transfer_push. Without, the slots must hold the
// bytes now. They must not change until they are quiet, which of a send that ended well they are.
//
// # Safety
//
// The contract of the crate.
kvf_status kvf_engine_send(const kvf_engine *engine,
                           const kvf_link *link,
                           uint64_t request,
                           uint32_t attempt,
                           const kvf_block_map *maps,
                           size_t map_count,
                           uint64_t first_token,
                           uint64_t end_token,
                           bool in_parts,
                           kvf_transfer **send);

// Frees a link. Disconnects nothing.
void kvf_link_free(kvf_link *link);

// Ends every request of an engine, says goodbye to its peers, stops its threads, and frees it. Waits for that.
void kvf_engine_free(kvf_engine *engine);

// Looks up runs in this agent's memory, of the host or of its GPU. The first that is in none is named.
//
// # Safety
//
// The contract of the crate.
kvf_status kvf_agent_prepare_local(const kvf_agent *agent,
                                   bool on_gpu,
                                   const kvf_run *runs,
                                   size_t count,
                                   kvf_list **list);

// Looks up runs in the memory that the remote agent has told of, and connects to it if that has not been done.
//
// # Safety
//
// The contract of the crate.
kvf_status kvf_agent_prepare_remote(const kvf_agent *agent,
                                    const char *name,
                                    bool on_gpu,
                                    const kvf_run *runs,
                                    size_t count,
                                    kvf_list **list);

// Frees a list. Transfers that were made of it stay.
void kvf_list_free(kvf_list *list);

// Pairs entry `from[i]` of a local list with entry `to[i]` of a remote one; NULL of a count of 0: all, in order. `read`: from
// remote to local memory, else the other way. `notification`: what the remote agent hears when the bytes are there; NULL: it
// hears nothing. Nothing is sent before kvf_move_post.
//
// # Safety
//
// The contract of the crate.
kvf_status kvf_agent_make(const kvf_agent *agent,
                          bool read,
                          const kvf_list *local,
                          const uint64_t *from,
                          size_t from_count,
                          const kvf_list *remote,
                          const uint64_t *to,
                          size_t to_count,
                          const kvf_slice *notification,
                          kvf_move **transfer);

// Starts to move the bytes. A transfer may be posted again when it has ended.
kvf_status kvf_move_post(const kvf_move *transfer);

// Waits until what was posted last has ended, `timeout_ms` at most; 0 only asks. KVF_OK: the bytes are there. KVF_PENDING: not
// yet, or not posted. Anything else says how it failed.
kvf_status kvf_move_wait(const kvf_move *transfer,
                         uint64_t timeout_ms);

// Gives a transfer up if it is under way, and waits until nothing of it reads or writes memory of this side any more,
// `timeout_ms` at most: KVF_PENDING: it still does.
kvf_status kvf_move_quiet(const kvf_move *transfer, uint64_t timeout_ms);

// Frees a transfer. One that is under way is given up, without waiting: its memory stays registered until it has ended.
void kvf_move_free(kvf_move *transfer);

// Works out who sends what to whom, of the tables of all ranks of a source instance and of a destination instance, in the order
// of ranks. It needs no engine. What does not fit together is named, as kvf_engine_connect does.
//
// # Safety
//
// The contract of the crate.
kvf_status kvf_plan_make(const kvf_table *const *sources,
                         size_t source_count,
                         const kvf_table *const *destinations,
                         size_t destination_count,
                         kvf_plan **plan);

// What moves of the tokens `first_token` to `end_token - 1` of a request of `request_tokens` (0: that ends with them): as a table
// in `text`, and drawn in `svg`; either may be NULL.
kvf_status kvf_plan_explain(const kvf_plan *plan,
                            uint64_t first_token,
                            uint64_t end_token,
                            uint64_t request_tokens,
                            kvf_bytes *text,
                            kvf_bytes *svg);

// Frees a plan.
void kvf_plan_free(kvf_plan *plan);

// First address, of the host or of the GPU. 0 for NULL.
uint64_t kvf_region_base(const kvf_region *region);

// Length in bytes. 0 for NULL.
uint64_t kvf_region_bytes(const kvf_region *region);

// Copies `length` bytes out of the region, from `offset` on, of the host or of the GPU. Does not wait for transfers.
//
// # Safety
//
// The contract of the crate.
kvf_status kvf_region_read(const kvf_region *region, uint64_t offset, uint8_t *to, size_t length);

// Copies `length` bytes into the region, at `offset`. Does not wait for transfers.
//
// # Safety
//
// The contract of the crate.
kvf_status kvf_region_write(const kvf_region *region, uint64_t offset, const uint8_t *from, size_t length);

// Frees a handle. The registration is undone when nothing uses it any more.
void kvf_region_free(kvf_region *region);

// What went wrong in the last call of this thread that failed, for people. Lasts until the next one that does.
const char *kvf_last_error(void);

// The name of the case, as the library's documentation has it: "Stalled", say. Lasts as kvf_last_error does.
const char *kvf_last_error_kind(void);

// The table of one rank of a model.
//
// - `config`: the model's config.json, as text.
// - `cut`: how the instance is cut: "tp8", "pp4tp2", "dp2", "cp2tp2".
//
// # Safety
//
// The contract of the crate.
kvf_status kvf_table_from_config(const char *config,
                                 const char *cut,
                                 uint32_t rank,
                                 const kvf_table_options *options,
                                 kvf_table **table);

// Reads a table that somebody else laid out: the form that kvf_table_to_json writes.
//
// # Safety
//
// The contract of the crate.
kvf_status kvf_table_from_json(const char *json, kvf_table **table);

// The table as JSON.
kvf_status kvf_table_to_json(const kvf_table *table, kvf_bytes *json);

// Pools of the table. 0 for NULL.
size_t kvf_table_pools(const kvf_table *table);

// Bytes that a pool takes, from its first slot to behind its last. 0 for a pool that there is not.
uint64_t kvf_table_pool_bytes(const kvf_table *table, size_t pool);

// Says where a pool's slot 0 is. kvf_engine_allocate does so itself; a pool that is nowhere yet is published where its region
// begins.
kvf_status kvf_table_place(const kvf_table *table,
                           size_t pool,
                           uint64_t base);

// Frees a table.
void kvf_table_free(kvf_table *table);

// The ways that bytes took to or from one peer of a request that has ended well, which is `peer` of kvf_transfer_peers: `*count` of
// them, of which the first `capacity` are written.
//
// # Safety
//
// The contract of the crate.
kvf_status kvf_transfer_ways(const kvf_transfer *transfer,
                             size_t peer,
                             kvf_way *ways,
                             size_t capacity,
                             size_t *count);

// Where the time of a request that has ended well went, with one peer, which is `peer` of kvf_transfer_peers.
kvf_status kvf_transfer_times(const kvf_transfer *transfer, size_t peer, kvf_peer_times *times);

// How the last post of a transfer that has ended well went. KVF_PENDING: it has not.
kvf_status kvf_move_telemetry(const kvf_move *transfer, kvf_move_times *telemetry);

// Waits until a request has ended, `timeout_ms` at most; 0 only asks. KVF_OK: it has ended well. KVF_PENDING: not yet. Anything
// else says how it failed, and so it does whenever it is asked.
kvf_status kvf_transfer_wait(const kvf_transfer *transfer,
                             uint64_t timeout_ms);

// Waits until the slots of a request are quiet, `timeout_ms` at most: nobody reads or writes them for it, now or later. KVF_OK
// says so, once; KVF_PENDING: not yet. A peer that is frozen keeps them for as long as it is.
kvf_status kvf_transfer_quiet(const kvf_transfer *transfer,
                              uint64_t timeout_ms);

// Gives a request up: it ends with KVF_CANCELLED, unless it has ended before.
kvf_status kvf_transfer_cancel(const kvf_transfer *transfer);

// Has `callback` called once, when the request has ended or its slots are quiet, or at once if it has ended: then
// kvf_transfer_wait and kvf_transfer_quiet say which.
kvf_status kvf_transfer_notify(const kvf_transfer *transfer, kvf_callback callback, void *context);

// What moved to or from each peer of a request that has ended well, in the order of ranks: `*count` of them, of which the first
// `capacity` are written.
//
// # Safety
//
// The contract of the crate.
kvf_status kvf_transfer_peers(const kvf_transfer *transfer,
                              kvf_peer *peers,
                              size_t capacity,
                              size_t *count);

// What the source that is `peer` of kvf_transfer_peers has added to the last part of a request that was received.
kvf_status kvf_transfer_note(const kvf_transfer *transfer, size_t peer, kvf_bytes *note);

// Adds a part to a send that was posted in parts. It leaves when it is ready and the destination has said where to: at once, or,
// if `signal` is not NULL, when the signal that is written there is set.
//
// # Safety
//
// The contract of the crate.
kvf_status kvf_transfer_push(const kvf_transfer *transfer,
                             const kvf_part *part,
                             kvf_signal **signal);

// The bytes of a part are there. Frees the signal. From any thread.
kvf_status kvf_signal_set(kvf_signal *signal);

// Frees the handle of a request, which goes on. Its slots cannot be asked after any more.
void kvf_transfer_free(kvf_transfer *transfer);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* KVFERRY_H */
