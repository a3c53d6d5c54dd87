// See modules.h. A fat binary holds several forms of a module, one after the other; only PTX that is not compressed
// can be used (nvcc's --no-compress).
#include "runtime/modules.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>

#include <cuda_runtime_api.h>

namespace sharpi::emulator {

namespace {

struct Wrapper {
    int32_t magic, version;
    const uint8_t* data;
    void* unused;
};
struct Header {
    uint32_t magic;
    uint16_t version, headerBytes;
    uint64_t bytes;
};
struct Part {
    uint16_t kind, version;
    uint32_t headerBytes;
    uint64_t bytes;
    uint32_t compressedBytes, unknown;
    uint16_t minor, major;
    uint32_t architecture;
};
constexpr uint16_t kPtx = 1;
constexpr uint32_t kFatBinary = 0xba55ed50;

struct Registered {
    std::string text;
    std::unique_ptr<Module> module;
    int codeVersion = 0;
};

struct Registry {
    std::mutex mutex;
    std::vector<std::unique_ptr<Registered>> modules;
    struct Entry {
        Registered* owner;
        std::string name;
        std::unique_ptr<Function> function;
    };
    std::map<const void*, Entry> entries;
    std::map<std::string, std::string> files;  // of SHARPI_EMULATOR_PTX, by the kernel's name
    std::map<std::string, std::unique_ptr<Module>> fileModules;
};
Registry& registry() {
    static Registry* const made = new Registry;
    return *made;
}

std::string ptxOf(const uint8_t* data, int& codeVersion) {
    Header header;
    std::memcpy(&header, data, sizeof(header));
    if (header.magic != kFatBinary) return "";
    const uint8_t* at = data + header.headerBytes;
    const uint8_t* const end = at + header.bytes;
    while (at < end) {
        Part part;
        std::memcpy(&part, at, sizeof(part));
        if (part.kind == kPtx) {
            codeVersion = static_cast<int>(part.architecture);
            const auto* text = reinterpret_cast<const char*>(at + part.headerBytes);
            if (part.compressedBytes == 0) return std::string(text, strnlen(text, part.bytes));
        }
        at += part.headerBytes + part.bytes;
    }
    return "";
}

}  // namespace

Function* findFunction(const void* host) {
    Registry& all = registry();
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto found = all.entries.find(host);
    if (found == all.entries.end()) return nullptr;
    Registry::Entry& entry = found->second;
    if (entry.function) return entry.function.get();
    Module* module = nullptr;
    if (!entry.owner->text.empty()) {
        if (!entry.owner->module) entry.owner->module = std::make_unique<Module>(std::move(entry.owner->text));
    }
    module = entry.owner->module.get();
    if (!module) {
        const char* folder = std::getenv("SHARPI_EMULATOR_PTX");
        if (!folder) return nullptr;
        if (all.files.empty()) {
            std::ifstream index(std::string(folder) + "/index.txt");
            std::string file, name;
            while (index >> file >> name) all.files[name] = file;
        }
        const auto file = all.files.find(entry.name);
        if (file == all.files.end()) return nullptr;
        std::unique_ptr<Module>& made = all.fileModules[file->second];
        if (!made) {
            std::ifstream in(std::string(folder) + "/" + file->second);
            std::stringstream text;
            text << in.rdbuf();
            made = std::make_unique<Module>(text.str());
        }
        module = made.get();
    }
    entry.function = std::make_unique<Function>();
    entry.function->name = entry.name;
    entry.function->module = module;
    entry.function->codeVersion = entry.owner->codeVersion;
    return entry.function.get();
}

}  // namespace sharpi::emulator

using namespace sharpi::emulator;

extern "C" {

void** __cudaRegisterFatBinary(void* wrapper) {
    Wrapper found;
    std::memcpy(&found, wrapper, sizeof(found));
    auto made = std::make_unique<Registered>();
    made->text = ptxOf(found.data, made->codeVersion);
    const std::lock_guard<std::mutex> lock(registry().mutex);
    registry().modules.push_back(std::move(made));
    return reinterpret_cast<void**>(registry().modules.back().get());
}

void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}

void __cudaRegisterFunction(void** handle, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
    const std::lock_guard<std::mutex> lock(registry().mutex);
    registry().entries[host] = {reinterpret_cast<Registered*>(handle), name, nullptr};
}

void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

}  // extern "C"
