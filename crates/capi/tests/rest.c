/* Every function of the interface that the examples do not call, and how each refuses what it cannot take. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kvferry.h"

enum { TOKENS = 64, SLOTS = 4, TIMEOUT_MS = 30000 };

#define EXPECT(condition)                                                                             \
  do {                                                                                                \
    if (!(condition)) {                                                                               \
      fprintf(stderr, "%s:%d: %s; last error %s: %s\n", __FILE__, __LINE__, #condition, kvf_last_error_kind(), \
              kvf_last_error());                                                                      \
      exit(1);                                                                                        \
    }                                                                                                 \
  } while (0)
#define OK(call) EXPECT((call) == KVF_OK)

static const char CONFIG[] =
    "{\"model_type\": \"llama\", \"num_hidden_layers\": 4, \"num_key_value_heads\": 2, \"head_dim\": 64}";

typedef struct {
  kvf_engine *engine;
  kvf_region *region;
  kvf_instance *card, *other;
  kvf_link *link;
  int source;
} side;

static kvf_table *table(void) {
  kvf_table_options options = {.tokens_per_block = 16, .slot_count = SLOTS, .dtype = "bf16", .cells = "nhd"};
  options.pooling = "block_major";
  kvf_table *made, *read;
  OK(kvf_table_from_config(CONFIG, "tp1", 0, &options, &made));
  kvf_bytes json;
  OK(kvf_table_to_json(made, &json));
  OK(kvf_table_from_json((const char *)json.data, &read));
  EXPECT(kvf_table_pool_bytes(read, 0) == kvf_table_pool_bytes(made, 0) && kvf_table_pool_bytes(read, 1) == 0);
  EXPECT(kvf_table_from_json("{}", &read) == KVF_TABLE && strcmp(kvf_last_error_kind(), "Json") == 0);
  options.cells = "hdn";
  EXPECT(kvf_table_from_config(CONFIG, "tp1", 0, &options, &read) == KVF_ARGUMENT && strstr(kvf_last_error(), "hnd, nhd"));
  EXPECT(kvf_table_place(made, 1, 0) == KVF_ARGUMENT);
  kvf_bytes_free(json);
  kvf_table_free(read);
  return made;
}

static void start(side *rank) {
  EXPECT(kvf_engine_start("{\"ranks\": 1}", NULL, &rank->engine) == KVF_ARGUMENT);
  EXPECT(kvf_engine_start("\xff", NULL, &rank->engine) == KVF_ARGUMENT && strstr(kvf_last_error(), "UTF-8"));
  EXPECT(kvf_engine_start(NULL, NULL, NULL) == KVF_ARGUMENT);
  const char *options = rank->source ? "{\"instance\": \"a\", \"patience_ms\": 20000}" : "{\"instance\": \"b\"}";
  OK(kvf_engine_start(options, NULL, &rank->engine));
  kvf_bytes card;
  EXPECT(kvf_engine_card(rank->engine, &card) == KVF_PUBLISH);
  kvf_table *own = table();
  EXPECT(kvf_engine_allocate(rank->engine, own, &rank->region, 2) == KVF_ARGUMENT);
  OK(kvf_engine_allocate(rank->engine, own, &rank->region, 1));
  EXPECT(kvf_region_bytes(rank->region) == kvf_table_pool_bytes(own, 0) && kvf_region_base(rank->region) != 0);
  OK(kvf_table_place(own, 0, kvf_region_base(rank->region)));
  const kvf_region *regions[] = {rank->region, NULL};
  EXPECT(kvf_engine_publish(rank->engine, own, regions, 2) == KVF_ARGUMENT);
  OK(kvf_engine_publish(rank->engine, own, regions, 1));
  EXPECT(kvf_engine_publish(rank->engine, own, regions, 1) == KVF_PUBLISH && strcmp(kvf_last_error_kind(), "Twice") == 0);
  kvf_table_free(own);
  OK(kvf_engine_card(rank->engine, &card));
  kvf_slice slices[] = {{card.data, card.length}, {card.data, card.length}};
  EXPECT(kvf_instance_new(slices, 2, &rank->card) == KVF_CARD && strcmp(kvf_last_error_kind(), "Twice") == 0);
  kvf_instance *made;
  OK(kvf_instance_new(slices, 1, &made));
  kvf_bytes bytes;
  OK(kvf_instance_to_bytes(made, &bytes));
  OK(kvf_instance_from_bytes((kvf_slice){bytes.data, bytes.length}, &rank->card));
  EXPECT(kvf_instance_from_bytes((kvf_slice){bytes.data, 5}, &made) == KVF_CARD);
  kvf_instance_free(made);
  kvf_bytes_free(bytes);
  kvf_bytes_free(card);
}

static void *connect_rank(void *of) {
  side *rank = of;
  kvf_instance *sources = rank->source ? rank->card : rank->other, *destinations = rank->source ? rank->other : rank->card;
  OK(kvf_engine_connect(rank->engine, sources, destinations, &rank->link));
  return NULL;
}

static void ended(void *context) {
  EXPECT(write(*(int *)context, "!", 1) == 1);
}

static void engines(void) {
  side prefill = {.source = 1}, decode = {.source = 0};
  start(&prefill);
  start(&decode);
  prefill.other = decode.card;
  decode.other = prefill.card;
  pthread_t other;
  EXPECT(pthread_create(&other, NULL, connect_rank, &decode) == 0);
  connect_rank(&prefill);
  EXPECT(pthread_join(other, NULL) == 0);

  EXPECT(kvf_region_write(prefill.region, kvf_region_bytes(prefill.region), (const uint8_t *)"x", 1) == KVF_REGION);
  const int64_t slots[] = {3, 1, 2, 0};
  const kvf_block_map map = {0, slots, 4}, hole = {0, (const int64_t[]){3, 1, -1, 0}, 4}, none = {0, (const int64_t[]){-2}, 1};
  const kvf_link *links[] = {decode.link};
  kvf_transfer *receive, *send;
  EXPECT(kvf_engine_receive(decode.engine, links, 1, 1, 0, &hole, 1, 0, TOKENS, &receive) == KVF_POST);
  EXPECT(kvf_engine_receive(decode.engine, links, 1, 1, 0, &none, 1, 0, TOKENS, &receive) == KVF_ARGUMENT);
  EXPECT(kvf_engine_receive(decode.engine, links, 1, 1, 0, NULL, 1, 0, TOKENS, &receive) == KVF_ARGUMENT);
  EXPECT(kvf_engine_receive(decode.engine, links, 1, 1, 0, &map, 1, TOKENS, 0, &receive) == KVF_ARGUMENT);
  EXPECT(kvf_engine_send(prefill.engine, decode.link, 1, 0, &map, 1, 0, TOKENS, false, &send) == KVF_POST);

  /* In parts, of which the last leaves when it is ready. */
  int told[2];
  char byte;
  EXPECT(pipe(told) == 0);
  OK(kvf_engine_receive(decode.engine, links, 1, 1, 0, &map, 1, 0, TOKENS, &receive));
  EXPECT(kvf_transfer_notify(receive, NULL, NULL) == KVF_ARGUMENT);
  OK(kvf_transfer_notify(receive, ended, &told[1]));
  OK(kvf_engine_send(prefill.engine, prefill.link, 1, 0, &map, 1, 0, TOKENS, true, &send));
  kvf_part part = {.first_token = 0, .end_token = 32};
  OK(kvf_transfer_push(send, &part, NULL));
  EXPECT(kvf_transfer_push(send, &part, NULL) == KVF_PUSH && strcmp(kvf_last_error_kind(), "Tokens") == 0);
  EXPECT(kvf_transfer_push(receive, &part, NULL) == KVF_ARGUMENT);
  part = (kvf_part){.first_token = 32, .end_token = TOKENS, .maps = &map, .map_count = 1, .note = {(const uint8_t *)"note", 4}};
  kvf_signal *ready;
  OK(kvf_transfer_push(send, &part, &ready));
  EXPECT(kvf_transfer_wait(receive, 100) == KVF_PENDING && kvf_transfer_quiet(receive, 0) == KVF_PENDING);
  OK(kvf_region_write(prefill.region, 0, (const uint8_t *)"computed", 8));
  OK(kvf_signal_set(ready));
  EXPECT(read(told[0], &byte, 1) == 1);
  OK(kvf_transfer_wait(receive, 0));
  OK(kvf_transfer_notify(receive, ended, &told[1]));
  EXPECT(read(told[0], &byte, 1) == 1);
  kvf_bytes note;
  OK(kvf_transfer_note(receive, 0, &note));
  EXPECT(note.length == 4 && memcmp(note.data, "note", 5) == 0);
  kvf_bytes_free(note);
  EXPECT(kvf_transfer_note(receive, 1, &note) == KVF_ARGUMENT && kvf_transfer_note(send, 0, &note) != KVF_OK);
  OK(kvf_transfer_quiet(receive, TIMEOUT_MS));
  EXPECT(kvf_transfer_quiet(receive, 0) == KVF_NOT_QUIET && strcmp(kvf_last_error_kind(), "Given") == 0);
  uint8_t arrived[8];
  OK(kvf_region_read(decode.region, 0, arrived, 8));
  EXPECT(memcmp(arrived, "computed", 8) == 0);
  OK(kvf_transfer_wait(send, TIMEOUT_MS));
  kvf_peer peer;
  size_t count;
  OK(kvf_transfer_peers(send, &peer, 1, &count));
  EXPECT(count == 1 && peer.bytes == kvf_region_bytes(decode.region));
  kvf_transfer *ends[] = {send, receive};
  for (int end = 0; end < 2; end++) {
    kvf_way ways[4];
    kvf_peer_times times;
    OK(kvf_transfer_ways(ends[end], 0, ways, 4, &count));
    uint64_t carried = 0;
    for (size_t way = 0; way < count; way++) {
      EXPECT(strcmp(ways[way].route, "direct") == 0 && strlen(ways[way].reason) > 0 && ways[way].runs > 0);
      carried += ways[way].bytes;
    }
    EXPECT(count > 0 && carried == peer.bytes);
    OK(kvf_transfer_times(ends[end], 0, &times));
    EXPECT(times.total_ns > 0 && times.total_ns >= times.queued_ns);
    EXPECT(kvf_transfer_ways(ends[end], 1, ways, 4, &count) == KVF_ARGUMENT);
    EXPECT(kvf_transfer_ways(ends[end], 0, NULL, 1, &count) == KVF_ARGUMENT);
    EXPECT(kvf_transfer_times(ends[end], 0, NULL) == KVF_ARGUMENT && kvf_transfer_times(NULL, 0, &times) == KVF_ARGUMENT);
  }
  kvf_transfer_free(receive);
  kvf_transfer_free(send);

  /* A request that is given up. */
  OK(kvf_engine_receive(decode.engine, links, 1, 2, 0, &map, 1, 0, TOKENS, &receive));
  EXPECT(kvf_engine_disconnect(decode.engine, decode.link) == KVF_POST);
  OK(kvf_transfer_cancel(receive));
  EXPECT(kvf_transfer_wait(receive, TIMEOUT_MS) == KVF_CANCELLED && kvf_transfer_peers(receive, &peer, 1, &count) == KVF_CANCELLED);
  OK(kvf_transfer_quiet(receive, TIMEOUT_MS));
  kvf_transfer_free(receive);
  OK(kvf_engine_disconnect(decode.engine, decode.link));

  side *both[] = {&prefill, &decode};
  for (int rank = 0; rank < 2; rank++) {
    kvf_link_free(both[rank]->link);
    kvf_instance_free(both[rank]->card);
    kvf_region_free(both[rank]->region);
    kvf_engine_free(both[rank]->engine);
  }
  close(told[0]);
  close(told[1]);
}

/* What would move from two ranks with half of the layers each to one with all of them. */
static void plans(void) {
  kvf_table_options options = {.tokens_per_block = 16, .slot_count = SLOTS, .dtype = "bf16"};
  kvf_table *sources[2], *destination, *other;
  for (uint32_t rank = 0; rank < 2; rank++) OK(kvf_table_from_config(CONFIG, "pp2", rank, &options, &sources[rank]));
  OK(kvf_table_from_config(CONFIG, "tp1", 0, &options, &destination));
  const kvf_table *from[] = {sources[0], sources[1]}, *to[] = {destination}, *none[] = {NULL};
  kvf_plan *plan;
  OK(kvf_plan_make(from, 2, to, 1, &plan));
  kvf_bytes text, svg;
  OK(kvf_plan_explain(plan, 0, TOKENS, 0, &text, &svg));
  EXPECT(strstr((const char *)text.data, "1 -> 0") != NULL && strncmp((const char *)svg.data, "<svg", 4) == 0);
  kvf_bytes_free(text);
  kvf_bytes_free(svg);
  OK(kvf_plan_explain(plan, 16, 32, TOKENS, &text, NULL));
  kvf_bytes_free(text);
  EXPECT(kvf_plan_explain(plan, 0, TOKENS, 0, NULL, NULL) == KVF_ARGUMENT);
  EXPECT(kvf_plan_explain(plan, 0, TOKENS, 16, &text, NULL) == KVF_MATCH && strcmp(kvf_last_error_kind(), "Chunk") == 0);
  EXPECT(kvf_plan_explain(plan, 16, 0, TOKENS, &text, NULL) == KVF_ARGUMENT);
  EXPECT(kvf_plan_explain(NULL, 0, TOKENS, 0, &text, NULL) == KVF_ARGUMENT);
  kvf_plan_free(plan);
  EXPECT(kvf_plan_make(from, 1, to, 1, &plan) == KVF_MATCH && strcmp(kvf_last_error_kind(), "Uncovered") == 0);
  EXPECT(kvf_plan_make(none, 1, to, 1, &plan) == KVF_ARGUMENT && kvf_plan_make(from, 2, to, 1, NULL) == KVF_ARGUMENT);
  options.dtype = "fp8_e4m3";
  OK(kvf_table_from_config(CONFIG, "tp1", 0, &options, &other));
  to[0] = other;
  EXPECT(kvf_plan_make(from, 2, to, 1, &plan) == KVF_MATCH && strcmp(kvf_last_error_kind(), "Incompatible") == 0);
  kvf_table_free(other);
  kvf_table_free(destination);
  for (int rank = 0; rank < 2; rank++) kvf_table_free(sources[rank]);
}

static void count_up(void *context) { ++*(int *)context; }

static void agents(void) {
  kvf_agent_options options = {.name = "a", .listen = "127.0.0.1:0", .patience_ms = 20000, .transfer_deadline_ms = TIMEOUT_MS};
  kvf_agent *a, *b;
  OK(kvf_agent_start(&options, &a));
  EXPECT(kvf_agent_port(a) != 0);
  kvf_agent_options nowhere = {.name = "b", .listen = "nowhere"}, nameless = {0}, plain = {.name = "b"};
  EXPECT(kvf_agent_start(&nowhere, &b) == KVF_ARGUMENT && kvf_agent_start(&nameless, &b) == KVF_ARGUMENT);
  OK(kvf_agent_start(&plain, &b));
  EXPECT(kvf_agent_port(b) == 0);

  static uint8_t own[8192];
  memset(own, 7, sizeof own);
  int released = 0;
  kvf_memory *of_a, *of_b;
  EXPECT(kvf_agent_register(a, 0, 1, false, NULL, NULL, &of_a) == KVF_ARGUMENT);
  /* Memory that was not registered is the caller's still. */
  const uint64_t last_page = UINT64_MAX - 4095;
  EXPECT(kvf_agent_register(a, 0, 1, false, count_up, &released, &of_a) == KVF_ARGUMENT);
  EXPECT(kvf_agent_register(a, last_page, 4096, false, count_up, &released, &of_a) == KVF_REGION);
  EXPECT(kvf_agent_register(a, last_page, 4096, true, count_up, &released, &of_a) == KVF_REGION);
  EXPECT(kvf_agent_register(NULL, last_page, 4096, false, count_up, &released, &of_a) == KVF_ARGUMENT);
  EXPECT(kvf_agent_register(a, last_page, 4096, false, count_up, &released, NULL) == KVF_ARGUMENT);
  EXPECT(released == 0);
  EXPECT(kvf_agent_allocate(a, 0, false, &of_a) == KVF_REGION);
  EXPECT(kvf_agent_allocate(a, 64, true, &of_a) == KVF_REGION && strcmp(kvf_last_error_kind(), "NoGpu") == 0);
  OK(kvf_agent_register(a, (uint64_t)(uintptr_t)own, sizeof own, false, count_up, &released, &of_a));
  OK(kvf_agent_allocate(b, sizeof own, false, &of_b));

  char at[32];
  snprintf(at, sizeof at, "127.0.0.1:%d", kvf_agent_port(a));
  kvf_bytes name;
  OK(kvf_agent_fetch_remote(b, at, TIMEOUT_MS, &name));
  EXPECT(strcmp((const char *)name.data, "a") == 0);
  kvf_bytes_free(name);
  OK(kvf_agent_send_metadata(b, at, TIMEOUT_MS));
  EXPECT(kvf_agent_fetch_remote(b, "127.0.0.1:1", TIMEOUT_MS, NULL) == KVF_EXCHANGE);
  EXPECT(kvf_agent_add_remote(b, (kvf_slice){(const uint8_t *)"junk", 4}, NULL) == KVF_REMOTE);
  OK(kvf_agent_notify(a, "b", (kvf_slice){(const uint8_t *)"hello", 5}));
  EXPECT(kvf_agent_notify(a, "c", (kvf_slice){0}) == KVF_REMOTE);
  kvf_notifications *heard;
  OK(kvf_agent_notifications(b, TIMEOUT_MS, &heard));
  EXPECT(kvf_notifications_count(heard) == 1);
  const char *from;
  kvf_slice message;
  EXPECT(kvf_notifications_at(heard, 1, &from, &message) == KVF_ARGUMENT);
  OK(kvf_notifications_at(heard, 0, &from, &message));
  EXPECT(strcmp(from, "a") == 0 && message.length == 5 && memcmp(message.data, "hello", 5) == 0);
  kvf_notifications_free(heard);
  OK(kvf_agent_notifications(b, 0, &heard));
  EXPECT(kvf_notifications_count(heard) == 0);
  kvf_notifications_free(heard);

  /* A read of all, in order. */
  kvf_run here = {kvf_memory_base(of_b), sizeof own}, there = {(uint64_t)(uintptr_t)own, sizeof own};
  kvf_list *local, *remote;
  OK(kvf_agent_prepare_local(b, false, &here, 1, &local));
  OK(kvf_agent_prepare_remote(b, "a", false, &there, 1, &remote));
  there.bytes++;
  kvf_list *outside;
  EXPECT(kvf_agent_prepare_remote(b, "a", false, &there, 1, &outside) == KVF_PREPARE);
  kvf_move *transfer;
  EXPECT(kvf_agent_make(b, true, remote, NULL, 0, remote, NULL, 0, NULL, &transfer) == KVF_PREPARE);
  uint64_t wrong = 1;
  EXPECT(kvf_agent_make(b, true, local, &wrong, 1, remote, NULL, 0, NULL, &transfer) == KVF_PREPARE);
  OK(kvf_agent_make(b, true, local, NULL, 0, remote, NULL, 0, NULL, &transfer));
  kvf_move_times times;
  EXPECT(kvf_move_wait(transfer, 0) == KVF_PENDING && kvf_move_telemetry(transfer, &times) == KVF_PENDING);
  OK(kvf_move_post(transfer));
  OK(kvf_move_wait(transfer, TIMEOUT_MS));
  OK(kvf_move_telemetry(transfer, &times));
  EXPECT(times.bytes == sizeof own && times.entries == 1 && times.started_us > 1600000000000000 && times.total_ns >= times.posting_ns);
  EXPECT((times.route == NULL) == (times.reason == NULL) && kvf_move_telemetry(transfer, NULL) == KVF_ARGUMENT);
  OK(kvf_move_quiet(transfer, TIMEOUT_MS));
  EXPECT(memcmp((void *)(uintptr_t)kvf_memory_base(of_b), own, sizeof own) == 0);
  kvf_move_free(transfer);
  kvf_list_free(local);
  kvf_list_free(remote);
  OK(kvf_agent_remove_remote(b, "a"));
  EXPECT(kvf_agent_remove_remote(b, "a") == KVF_REMOTE);

  EXPECT(released == 0);
  OK(kvf_agent_deregister(a, of_a, TIMEOUT_MS));
  EXPECT(released == 1 && kvf_agent_deregister(a, of_a, 0) == KVF_REGION);
  kvf_memory_free(of_a);
  kvf_memory_free(of_b);
  kvf_agent_free(a);
  kvf_agent_free(b);
}

/* Lengths that are none: negative numbers, as a rule. */
static void lengths(kvf_engine *engine, kvf_region *region) {
  const size_t wrong[] = {SIZE_MAX, SIZE_MAX / 2 + 1, SIZE_MAX / 8};
  uint8_t byte = 0;
  for (int at = 0; at < 3; at++) {
    const kvf_slice slice = {&byte, wrong[at]};
    kvf_instance *instance;
    kvf_plan *plan;
    kvf_transfer *transfer;
    const kvf_table *tables[1] = {NULL};
    const kvf_link *links[1] = {NULL};
    const kvf_block_map map = {0, (const int64_t *)tables, wrong[at]};
    if (at < 2) EXPECT(kvf_instance_from_bytes(slice, &instance) == KVF_ARGUMENT);
    if (at < 2) EXPECT(kvf_instance_new(&slice, 1, &instance) == KVF_ARGUMENT);
    EXPECT(kvf_instance_new(&slice, wrong[at], &instance) == KVF_ARGUMENT);
    EXPECT(kvf_plan_make(tables, wrong[at], tables, 1, &plan) == KVF_ARGUMENT);
    EXPECT(kvf_engine_receive(engine, links, wrong[at], 1, 0, &map, 1, 0, 1, &transfer) == KVF_ARGUMENT);
    EXPECT(kvf_engine_receive(engine, NULL, 0, 1, 0, &map, 1, 0, 1, &transfer) == KVF_ARGUMENT);
    EXPECT(kvf_engine_receive(engine, NULL, 0, 1, 0, &map, wrong[at], 0, 1, &transfer) == KVF_ARGUMENT);
    EXPECT(kvf_region_read(region, 0, &byte, wrong[at]) == KVF_REGION && byte == 0);
    if (at < 2) EXPECT(kvf_region_write(region, 0, &byte, wrong[at]) == KVF_ARGUMENT);
    EXPECT(kvf_region_read(region, UINT64_MAX, &byte, 1) == KVF_REGION && kvf_region_write(region, UINT64_MAX, &byte, 1) == KVF_REGION);
    kvf_region *none;
    EXPECT(kvf_engine_register(engine, UINT64_MAX - 4095, 4096, false, NULL, NULL, &none) == KVF_REGION);
    EXPECT(kvf_engine_register(engine, (uint64_t)(uintptr_t)&byte, UINT64_MAX, false, NULL, NULL, &none) == KVF_REGION);
  }
}

/* What a forked process does with handles of its parent. */
static void forked(void) {
  side rank = {.source = 1};
  start(&rank);
  lengths(rank.engine, rank.region);
  kvf_agent_options options = {.name = "parent"};
  kvf_agent *agent;
  kvf_memory *memory;
  kvf_list *list;
  kvf_move *transfer;
  OK(kvf_agent_start(&options, &agent));
  OK(kvf_agent_allocate(agent, 4096, false, &memory));
  kvf_run run = {kvf_memory_base(memory), 4096};
  OK(kvf_agent_prepare_local(agent, false, &run, 1, &list));
  kvf_list *remote;
  OK(kvf_agent_prepare_remote(agent, "parent", false, &run, 1, &remote));
  OK(kvf_agent_make(agent, false, list, NULL, 0, remote, NULL, 0, NULL, &transfer));
  fflush(NULL);
  pid_t child = fork();
  EXPECT(child >= 0);
  if (child == 0) {
    alarm(20);
    kvf_bytes bytes;
    uint8_t byte;
    EXPECT(kvf_engine_card(rank.engine, &bytes) == KVF_FORKED && strcmp(kvf_last_error_kind(), "Forked") == 0);
    EXPECT(kvf_region_read(rank.region, 0, &byte, 1) == KVF_FORKED && kvf_region_base(rank.region) == 0);
    EXPECT(kvf_agent_metadata(agent, &bytes) == KVF_FORKED && kvf_agent_notify(agent, "parent", (kvf_slice){0}) == KVF_FORKED);
    EXPECT(kvf_move_post(transfer) == KVF_FORKED && kvf_move_wait(transfer, 1000) == KVF_FORKED);
    EXPECT(kvf_move_quiet(transfer, 1000) == KVF_FORKED && kvf_agent_deregister(agent, memory, 1000) == KVF_FORKED);
    kvf_move_free(transfer);
    kvf_list_free(list);
    kvf_list_free(remote);
    kvf_memory_free(memory);
    kvf_agent_free(agent);
    kvf_region_free(rank.region);
    kvf_instance_free(rank.card);
    kvf_engine_free(rank.engine);
    /* UCX was at work, and may hold its locks here for ever. */
    options.name = "child";
    kvf_engine *engine;
    EXPECT(kvf_agent_start(&options, &agent) == KVF_FORKED && kvf_engine_start(NULL, NULL, &engine) == KVF_FORKED);
    exit(0);
  }
  int status;
  EXPECT(waitpid(child, &status, 0) == child && status == 0);
  OK(kvf_move_post(transfer));
  OK(kvf_move_wait(transfer, UINT64_MAX));
  OK(kvf_move_quiet(transfer, UINT64_MAX));
  kvf_move_free(transfer);
  kvf_list_free(list);
  kvf_list_free(remote);
  kvf_memory_free(memory);
  kvf_agent_free(agent);
  kvf_region_free(rank.region);
  kvf_instance_free(rank.card);
  kvf_engine_free(rank.engine);
}

int main(void) {
  EXPECT(strlen(kvf_version()) > 0 && kvf_last_error()[0] == 0);
  kvf_bytes report;
  OK(kvf_doctor(&report));
  EXPECT(strstr((const char *)report.data, "UCX") != NULL);
  kvf_bytes_free(report);
  EXPECT(kvf_doctor(NULL) == KVF_ARGUMENT);
  plans();
  engines();
  agents();
  forked();
  /* Freeing nothing. */
  kvf_agent_free(NULL);
  kvf_bytes_free((kvf_bytes){0});
  kvf_engine_free(NULL);
  kvf_instance_free(NULL);
  kvf_link_free(NULL);
  kvf_list_free(NULL);
  kvf_memory_free(NULL);
  kvf_move_free(NULL);
  kvf_notifications_free(NULL);
  kvf_plan_free(NULL);
  kvf_region_free(NULL);
  kvf_table_free(NULL);
  kvf_transfer_free(NULL);
  OK(kvf_signal_set(NULL));
  puts("all functions do what they say");
  return 0;
}
