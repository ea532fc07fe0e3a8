// own_range is block_range.h's.
#pragma once

#include "shared/block_range.h"
