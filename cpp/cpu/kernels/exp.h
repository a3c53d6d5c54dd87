// The exponential of all float kernels. The C library's differs between machines and from a GPU's, so its operations
// are fixed here; each rounds to nearest even, and fma rounds once. Other code that must give these bits follows this:
//
//   x = x > 88 ? 88 : x                     (a NaN stays; the result saturates at exp(88), about 1.65e38)
//   t = fma(x, 0x1.715476p+0, 0x1.8p+23)    (log2 e; the low bits of t are now n = round(x * log2 e))
//   n = t - 0x1.8p+23
//   r = fma(n, -0x1.62e4p-1, x)             (ln 2 in two parts; the product with the first is exact)
//   r = fma(n, -0x1.7f7d1cp-20, r)
//   p = 0x1.6d112cp-10
//   p = fma(p, r, 0x1.120b90p-7); p = fma(p, r, 0x1.55551ap-5); p = fma(p, r, 0x1.5554dcp-3); p = fma(p, r, 0.5)
//   p = fma(p * r, r, r)                    (p * r rounded first)
//   result = (p + 1) * 2^n                  (2^n by its bits: (bits(t) << 23) + 0x3f800000; the product is exact)
//   result = +0 if x < -87
//
// Degree 6: an interpolation of (e^r - 1 - r) / r^2 at the five Chebyshev nodes of |r| <= 0.3467. The polynomial's
// error is 1.1e-8, and the result's at most about one unit in the last place.
#pragma once

#include "cpu/kernels/vec.h"

namespace sharpi::cpu::SHARPI_ISA {

SHARPI_INLINE Vec vexp(Vec x) {
    // vmin and vmax give their second operand if either is NaN.
    const Vec bounded = vmin(vset(88.0f), x);
    const Vec magic = vset(0x1.8p+23f);
    const Vec t = vfma(bounded, vset(0x1.715476p+0f), magic);
    const Vec n = vsub(t, magic);
    Vec r = vfma(n, vset(-0x1.62e4p-1f), bounded);
    r = vfma(n, vset(-0x1.7f7d1cp-20f), r);
    Vec p = vset(0x1.6d112cp-10f);
    p = vfma(p, r, vset(0x1.120b90p-7f));
    p = vfma(p, r, vset(0x1.55551ap-5f));
    p = vfma(p, r, vset(0x1.5554dcp-3f));
    p = vfma(p, r, vset(0.5f));
    p = vfma(vmul(p, r), r, r);
    return vzeroWhereBelow(x, -87.0f, vmul(vadd(p, vset(1.0f)), vpow2FromLowBits(t)));
}

// core/portable.h's portableSoftcap, operation for operation: cap * (1 - 2 / (1 + exp(2 * (x / cap)))).
SHARPI_INLINE Vec vsoftcap(Vec x, Vec cap) {
    const Vec power = vexp(vmul(vset(2.0f), vdiv(x, cap)));
    return vmul(cap, vsub(vset(1.0f), vdiv(vset(2.0f), vadd(vset(1.0f), power))));
}

}  // namespace sharpi::cpu::SHARPI_ISA
