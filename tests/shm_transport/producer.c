/* An engine in another language, made from the byte map in ARCHITECTURE.md alone: it attaches to both rings, reads one
 * ADD, and publishes ATTACHED and one STEP of three rows.
 * Usage: producer STEP_NAME REQUEST_NAME EPOCH */
#include <fcntl.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>

enum { HEADER_BYTES = 4096, RECORD_BYTES = 128, LINE_BYTES = 64, ADD_BYTES = 144 };
enum { STEP = 1, ATTACHED = 2, ADD = 16, ANY_FINISHED = 2, STOP = 1 };

typedef struct {
    uint8_t *memory;
    sem_t *filled, *free;
    uint64_t sequence; /* of the next record: this side's own, never shared */
} ring_t;

#define GET(type, at) (*(type *)(at)) /* every field lies on a multiple of its size */
#define DIE(...) (fprintf(stderr, __VA_ARGS__), exit(1))

static void expect(const char *what, uint64_t value, uint64_t expected) {
    if (value != expected)
        DIE("%s is %#llx, expected %#llx\n", what, (unsigned long long)value, (unsigned long long)expected);
}

static ring_t attach(const char *name, uint32_t kind, uint64_t epoch) {
    ring_t ring = {0};
    char filled[256], free_[256];
    uint64_t magic;
    struct stat file;
    int fd = shm_open(name, O_RDWR, 0);
    if (fd < 0 || fstat(fd, &file) < 0 || file.st_size < HEADER_BYTES) DIE("no ring named %s\n", name);
    ring.memory = mmap(NULL, file.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (ring.memory == MAP_FAILED) DIE("cannot map %s\n", name);
    memcpy(&magic, "ringsrv", 8);
    expect("magic", GET(uint64_t, ring.memory), magic);
    expect("version", GET(uint32_t, ring.memory + 8), 4);
    expect("ring", GET(uint32_t, ring.memory + 12), kind);
    expect("file size", file.st_size, GET(uint64_t, ring.memory + 24));
    expect("epoch", GET(uint64_t, ring.memory + 32), epoch);
    snprintf(filled, sizeof filled, "%s-filled", name);
    snprintf(free_, sizeof free_, "%s-free", name);
    ring.filled = sem_open(filled, 0);
    ring.free = sem_open(free_, 0);
    if (ring.filled == SEM_FAILED || ring.free == SEM_FAILED) DIE("%s has no semaphores\n", name);
    return ring;
}

static uint8_t *next_slot(ring_t *ring, sem_t *token) {
    while (sem_wait(token)) {} /* a signal: once more */
    uint32_t num_slots = GET(uint32_t, ring->memory + 16), slot_bytes = GET(uint32_t, ring->memory + 20);
    return ring->memory + HEADER_BYTES + ring->sequence % num_slots * (uint64_t)slot_bytes;
}

static void publish(ring_t *ring, uint16_t kind, uint16_t flags, uint64_t handle, int32_t *tokens, uint32_t rows) {
    struct timespec now;
    uint8_t *slot = next_slot(ring, ring->free), *column = slot + RECORD_BYTES;
    const uint32_t items[] = {GET(uint32_t, ring->memory + 40), GET(uint32_t, ring->memory + 44)};
    const uint32_t sizes[] = {8, 4, 4, 1, 4, 4, 8, 8, 4, 1, 4}; /* handle ... num_logprobs by row, token_id by token */
    for (int i = 0; i < 11; column += (sizes[i] * items[i == 10] + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES, i++)
        for (uint32_t row = 0; row < rows; row++) {
            if (i == 0) GET(uint64_t, column + 8 * row) = handle + row;
            if (i == 3) GET(uint8_t, column + row) = row + 1 == rows ? STOP : 0;
            if (i == 4) GET(int32_t, column + 4 * row) = row + 1 == rows ? tokens[row] : -1;
            if (i == 10) GET(int32_t, column + 4 * row) = tokens[row];
        }
    memset(slot, 0, RECORD_BYTES);
    GET(uint64_t, slot) = ring->sequence++;
    GET(uint16_t, slot + 8) = kind;
    GET(uint16_t, slot + 10) = flags;
    GET(uint32_t, slot + 24) = GET(uint32_t, slot + 28) = rows; /* one token in each row */
    clock_gettime(CLOCK_MONOTONIC, &now);
    GET(uint64_t, slot + 88) = now.tv_sec * 1000000000ull + now.tv_nsec;
    sem_post(ring->filled);
}

int main(int argc, char **argv) {
    if (argc != 4) DIE("usage: producer STEP_NAME REQUEST_NAME EPOCH\n");
    uint64_t epoch = strtoull(argv[3], NULL, 10);
    ring_t steps = attach(argv[1], 1, epoch), requests = attach(argv[2], 2, epoch);
    publish(&steps, ATTACHED, 0, 0, NULL, 0);
    uint8_t *slot = next_slot(&requests, requests.filled), *body = slot + RECORD_BYTES;
    expect("sequence", GET(uint64_t, slot), requests.sequence++);
    expect("kind", GET(uint16_t, slot + 8), ADD);
    expect("flags", GET(uint16_t, slot + 10), 0);
    uint64_t handle = GET(uint64_t, body);
    expect("forks", GET(uint32_t, body + 96), 0);
    int32_t length = GET(uint32_t, body + 100), *prompt = (int32_t *)(body + ADD_BYTES);
    if (length < 1) DIE("a prompt of %d tokens\n", length);
    int32_t tokens[] = {length, prompt[0], prompt[length - 1]};
    sem_post(requests.free);
    publish(&steps, STEP, ANY_FINISHED, handle, tokens, 3);
}
