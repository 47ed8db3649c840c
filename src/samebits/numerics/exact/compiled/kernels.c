/* Compiled forms of exact functions for CPUs: the same steps as in Python, in one pass over memory. gpu.cu is for GPUs.
 *
 * Every line is an addition, a multiplication, a division, a square root, a comparison or a look at bits, each rounded as
 * IEEE 754 says, in the order of the Python function of the same name. A compiler may vectorise that, but may not fuse a
 * multiplication with an addition (-ffp-contract=off) or reorder sums (no -ffast-math). So a kernel gives the bits of its
 * Python function on every host; tests/numerics/test_compiled.py compares the two. Convolutions and matrix products add
 * exact products, in any order.
 */
#include "kernels/numbers.h"
#include "kernels/functions.h"
#include "kernels/threads.h"
#include "kernels/many.h"
#include "kernels/draws.h"
#include "kernels/sums.h"
#include "kernels/grids.h"
#include "kernels/rows.h"
#include "kernels/places.h"
#include "kernels/pooling.h"
#include "kernels/cells.h"
#include "kernels/vectors.h"
#include "kernels/depthwise.h"
#include "kernels/convolutions.h"
#include "kernels/products.h"
#include "kernels/optimizers.h"
