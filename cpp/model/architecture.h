// The architectures that Sharpi knows. Each family is one file of model/architectures/, which the build finds by
// itself:
//
//     SHARPI_FAMILY(qwen3) { return {{"qwen3", read}, {"qwen3moe", read, Experts::Always}}; }
//
// The family's name is the file's. A reader describes the model layer by layer to a ModelReader.
#pragma once

#include <vector>

#include "model/model_reader.h"

namespace sharpi {

// Whether an architecture's models are mixtures. A file of one that always is has to say how many experts it has.
enum class Experts { Maybe, Always };

struct Architecture {
    const char* name;  // general.architecture, and the prefix of the metadata keys
    void (*read)(ModelReader& model);
    Experts experts = Experts::Maybe;
};

#define SHARPI_FAMILY(family) std::vector<::sharpi::Architecture> sharpi::families::family()

namespace families {
#define SHARPI_LISTED_FAMILY(family) std::vector<Architecture> family();
#include "families.inc"  // made by the build: a line for each file of model/architectures/
#undef SHARPI_LISTED_FAMILY
}  // namespace families

}  // namespace sharpi
