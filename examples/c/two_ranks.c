/* Moves a request from a prefill to a decode process that have blocks of different sizes, and checks every byte: the level of page
 * tables. See ci/capi for how it is built. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kvferry.h"

enum { LAYERS = 4, HEADS = 2, HEAD_BYTES = 128, TOKENS = 64, SLOTS = 16, TIMEOUT_MS = 30000 };

static const char CONFIG[] =
    "{\"model_type\": \"llama\", \"num_hidden_layers\": 4, \"num_key_value_heads\": 2, \"head_dim\": 64}";

static void check(kvf_status status, const char *what) {
  if (status == KVF_OK) return;
  fprintf(stderr, "%s: status %d, %s: %s\n", what, (int)status, kvf_last_error_kind(), kvf_last_error());
  exit(1);
}

static void swap_bytes(int peer, kvf_slice own, uint8_t **theirs, size_t *length) {
  uint64_t size = own.length;
  assert(write(peer, &size, sizeof size) == sizeof size && write(peer, own.data, size) == (ssize_t)size);
  assert(read(peer, &size, sizeof size) == sizeof size);
  *theirs = malloc(size);
  *length = size;
  for (size_t got = 0; got < size;) {
    ssize_t more = read(peer, *theirs + got, size - got);
    assert(more > 0);
    got += (size_t)more;
  }
}

/* The byte of one token's cell: of any layer, keys or values, head and place. */
static uint8_t value(int token, int layer, int role, int head, int byte) {
  return (uint8_t)(token * 31 + layer * 17 + role * 11 + head * 7 + byte);
}

/* Writes or compares a request in a pool whose slots are [layers, keys and values, heads, tokens, head]. */
static void walk(uint8_t *pool, const int64_t *slots, int block_tokens, int compare) {
  for (int token = 0; token < TOKENS; token++)
    for (int layer = 0; layer < LAYERS; layer++)
      for (int role = 0; role < 2; role++)
        for (int head = 0; head < HEADS; head++) {
          int64_t row = ((slots[token / block_tokens] * LAYERS + layer) * 2 + role) * HEADS + head;
          uint8_t *cell = pool + (row * block_tokens + token % block_tokens) * HEAD_BYTES;
          for (int byte = 0; byte < HEAD_BYTES; byte++) {
            uint8_t expected = value(token, layer, role, head, byte);
            if (!compare) cell[byte] = expected;
            else if (cell[byte] != expected) {
              fprintf(stderr, "token %d layer %d: %d instead of %d\n", token, layer, cell[byte], expected);
              exit(1);
            }
          }
        }
}

static void released(void *pool) { free(pool); }

static void rank(int source, int peer) {
  const int block_tokens = source ? 16 : 32;
  const int64_t prefill_slots[] = {9, 2, 5, 11}, decode_slots[] = {3, 0};
  kvf_block_map map = {0, source ? prefill_slots : decode_slots, (size_t)(TOKENS / block_tokens)};

  kvf_engine *engine;
  check(kvf_engine_start(source ? "{\"instance\": \"prefill\"}" : "{\"instance\": \"decode\"}", NULL, &engine), "start");
  kvf_table_options options = {.tokens_per_block = (uint32_t)block_tokens, .slot_count = SLOTS, .dtype = "bf16"};
  kvf_table *table;
  check(kvf_table_from_config(CONFIG, "tp1", 0, &options, &table), "table");
  /* The source's memory is its own, the destination's the engine's, which the source can map. */
  assert(kvf_table_pools(table) == 1);
  const uint64_t bytes = kvf_table_pool_bytes(table, 0);
  kvf_region *region;
  if (source) {
    uint8_t *pool = calloc(1, bytes);
    walk(pool, map.slots, block_tokens, 0);
    check(kvf_engine_register(engine, (uint64_t)(uintptr_t)pool, bytes, false, released, pool, &region), "register");
  } else {
    check(kvf_engine_allocate(engine, table, &region, 1), "allocate");
  }
  const kvf_region *regions[] = {region};
  check(kvf_engine_publish(engine, table, regions, 1), "publish");

  kvf_bytes card;
  check(kvf_engine_card(engine, &card), "card");
  kvf_slice cards[2] = {{card.data, card.length}, {NULL, 0}};
  uint8_t *theirs;
  swap_bytes(peer, cards[0], &theirs, &cards[1].length);
  cards[1].data = theirs;
  kvf_instance *own, *other;
  check(kvf_instance_new(&cards[0], 1, &own), "own instance");
  check(kvf_instance_new(&cards[1], 1, &other), "the other instance");
  kvf_link *link;
  check(kvf_engine_connect(engine, source ? own : other, source ? other : own, &link), "connect");

  kvf_transfer *transfer;
  const kvf_link *links[] = {link};
  if (source) check(kvf_engine_send(engine, link, 1, 0, &map, 1, 0, TOKENS, false, &transfer), "send");
  else check(kvf_engine_receive(engine, links, 1, 1, 0, &map, 1, 0, TOKENS, &transfer), "receive");
  check(kvf_transfer_wait(transfer, TIMEOUT_MS), "wait");
  check(kvf_transfer_quiet(transfer, TIMEOUT_MS), "quiet");
  if (!source) {
    kvf_peer from;
    size_t count;
    check(kvf_transfer_peers(transfer, &from, 1, &count), "peers");
    assert(count == 1 && from.bytes == (uint64_t)TOKENS * LAYERS * 2 * HEADS * HEAD_BYTES);
    uint8_t *pool = malloc(bytes);
    check(kvf_region_read(region, 0, pool, bytes), "read");
    walk(pool, map.slots, block_tokens, 1);
    free(pool);
    printf("%llu bytes arrived, every one is right\n", (unsigned long long)from.bytes);
  }

  kvf_transfer_free(transfer);
  kvf_link_free(link);
  kvf_instance_free(own);
  kvf_instance_free(other);
  kvf_bytes_free(card);
  free(theirs);
  kvf_region_free(region);
  kvf_table_free(table);
  kvf_engine_free(engine);
}

int main(void) {
  assert(kvf_abi_version() == KVF_ABI_VERSION);
  /* What goes wrong has a status, a kind and a message. */
  kvf_table *table;
  kvf_table_options options = {.tokens_per_block = 16, .slot_count = SLOTS, .dtype = "bf16"};
  assert(kvf_table_from_config(CONFIG, "tp1", 7, &options, &table) == KVF_TABLE);
  assert(strstr(kvf_last_error(), "rank 7") != NULL && strcmp(kvf_last_error_kind(), "Cut") == 0);
  assert(kvf_transfer_wait(NULL, 0) == KVF_ARGUMENT && strstr(kvf_last_error(), "NULL") != NULL);

  /* Forked before there is an engine: afterwards it would be of no use. */
  int peers[2];
  assert(socketpair(AF_UNIX, SOCK_STREAM, 0, peers) == 0);
  pid_t child = fork();
  assert(child >= 0);
  rank(child != 0, peers[child != 0]);
  if (child == 0) return 0;
  int status;
  assert(waitpid(child, &status, 0) == child);
  return status != 0;
}
