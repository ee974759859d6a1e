// Logits of llama.cpp for given tokens, in float32 on standard output: all rows of every window, one after the other.
//
// usage: llama-logits MODEL TOKENS WINDOW THREADS
//
// TOKENS is a file of int32 ids, whole windows of WINDOW tokens, each decoded in one batch from an empty cache.

#include "llama.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <vector>

static int failed(const char * what) {
    std::fprintf(stderr, "%s\n", what);
    return 1;
}

int main(int argc, char ** argv) {
    if (argc != 5) {
        return failed("usage: llama-logits MODEL TOKENS WINDOW THREADS");
    }
    const int window = std::atoi(argv[3]);
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (model == nullptr) {
        return failed("the model cannot be read");
    }
    llama_context_params params = llama_context_default_params();
    params.n_ctx = params.n_batch = params.n_ubatch = window;
    params.n_threads = params.n_threads_batch = std::atoi(argv[4]);
    llama_context * context = llama_init_from_model(model, params);
    if (context == nullptr) {
        return failed("there is no context of this size");
    }
    const size_t width = llama_vocab_n_tokens(llama_model_get_vocab(model));
    llama_batch batch = llama_batch_init(window, 0, 1);
    std::ifstream tokens(argv[2], std::ios::binary);
    std::vector<int32_t> ids(window);
    while (tokens.read(reinterpret_cast<char *>(ids.data()), sizeof(int32_t) * window)) {
        llama_memory_clear(llama_get_memory(context), true);
        batch.n_tokens = window;
        for (int i = 0; i < window; ++i) {
            batch.token[i]     = ids[i];
            batch.pos[i]       = i;
            batch.n_seq_id[i]  = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i]    = true;
        }
        if (llama_decode(context, batch) != 0) {
            return failed("the tokens cannot be decoded");
        }
        for (int i = 0; i < window; ++i) {
            if (std::fwrite(llama_get_logits_ith(context, i), sizeof(float), width, stdout) != width) {
                return failed("the logits cannot be written");
            }
        }
    }
    llama_batch_free(batch);
    llama_free(context);
    llama_model_free(model);
    return 0;
}
