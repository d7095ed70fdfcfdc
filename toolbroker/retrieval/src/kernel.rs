//! The two loops that every query spends its time in, over integers, so that
//! each build and each CPU gives the same answer.
//!
//! Each is written once, in plain Rust, and compiled twice: for any x86-64
//! (or any other architecture), and for those with AVX2 and POPCNT, where the
//! compiler makes several times faster code of the same lines.

use crate::embedding::{DIMENSIONS, Signs};

/// The products of `a`'s and `b`'s numbers, summed. At most 256 × 127² and so
/// far from overflow.
#[inline(always)]
fn dot_plain(a: &[i8; DIMENSIONS], b: &[i8; DIMENSIONS]) -> i32 {
    let mut sum = 0i32;
    for at in 0..DIMENSIONS {
        sum = sum.wrapping_add(i32::from(a[at]) * i32::from(b[at]));
    }
    sum
}

// Loops and no iterators: a closure would be compiled for the plain CPU.
#[inline(always)]
fn dots_plain(
    query: &[i8; DIMENSIONS],
    rows: &[[i8; DIMENSIONS]],
    places: &[u32],
    out: &mut Vec<i32>,
) {
    let start = out.len();
    out.resize(start + places.len(), 0);
    let out = &mut out[start..];
    for at in 0..places.len() {
        out[at] = dot_plain(query, &rows[places[at] as usize]);
    }
}

#[inline(always)]
fn distances_plain(query: &Signs, rows: &[Signs], out: &mut Vec<u16>) {
    let start = out.len();
    out.resize(start + rows.len(), 0);
    let out = &mut out[start..];
    for at in 0..rows.len() {
        let mut differ = 0;
        for part in 0..query.len() {
            differ += (query[part] ^ rows[at][part]).count_ones();
        }
        out[at] = differ as u16;
    }
}

/// One dot product.
pub(crate) fn dot(a: &[i8; DIMENSIONS], b: &[i8; DIMENSIONS]) -> i32 {
    dot_plain(a, b)
}

/// Appends the dot product of `query` and each of the `rows` at `places`.
///
/// # Panics
/// If a place is beyond the rows.
pub(crate) fn dots(
    query: &[i8; DIMENSIONS],
    rows: &[[i8; DIMENSIONS]],
    places: &[u32],
    out: &mut Vec<i32>,
) {
    #[cfg(target_arch = "x86_64")]
    if fast::is_there() {
        return fast::dots(query, rows, places, out);
    }
    dots_plain(query, rows, places, out);
}

/// Appends in how many signs `query` and each of the `rows` differ.
pub(crate) fn distances(query: &Signs, rows: &[Signs], out: &mut Vec<u16>) {
    #[cfg(target_arch = "x86_64")]
    if fast::is_there() {
        return fast::distances(query, rows, out);
    }
    distances_plain(query, rows, out);
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod fast {
    use super::{DIMENSIONS, Signs, distances_plain, dots_plain};

    /// Whether this CPU has what the functions below need.
    #[inline]
    pub(super) fn is_there() -> bool {
        is_x86_feature_detected!("avx2") && is_x86_feature_detected!("popcnt")
    }

    pub(super) fn dots(
        query: &[i8; DIMENSIONS],
        rows: &[[i8; DIMENSIONS]],
        places: &[u32],
        out: &mut Vec<i32>,
    ) {
        #[target_feature(enable = "avx2")]
        fn compiled(
            query: &[i8; DIMENSIONS],
            rows: &[[i8; DIMENSIONS]],
            places: &[u32],
            out: &mut Vec<i32>,
        ) {
            dots_plain(query, rows, places, out);
        }
        assert!(is_there());
        // SAFETY: it is safe code that needs AVX2, which was found a line above.
        unsafe { compiled(query, rows, places, out) }
    }

    pub(super) fn distances(query: &Signs, rows: &[Signs], out: &mut Vec<u16>) {
        #[target_feature(enable = "avx2,popcnt")]
        fn compiled(query: &Signs, rows: &[Signs], out: &mut Vec<u16>) {
            distances_plain(query, rows, out);
        }
        assert!(is_there());
        // SAFETY: it is safe code that needs AVX2 and POPCNT, which were found a line above.
        unsafe { compiled(query, rows, out) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers without pattern, extremes among them, the same every time.
    fn rows(count: usize) -> Vec<[i8; DIMENSIONS]> {
        let mut state = 1u64;
        let mut next = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            ((state >> 56) as i8).max(-127)
        };
        let mut rows: Vec<_> = (0..count).map(|_| std::array::from_fn(|_| next())).collect();
        rows.push([127; DIMENSIONS]);
        rows.push([-127; DIMENSIONS]);
        rows
    }

    #[test]
    fn the_fast_and_the_plain_loop_give_the_same_numbers() {
        let rows = rows(500);
        let places: Vec<u32> = (0..rows.len() as u32).rev().collect();
        let signs: Vec<Signs> = rows
            .iter()
            .map(|row| {
                std::array::from_fn(|at| {
                    row[64 * at..64 * (at + 1)]
                        .iter()
                        .enumerate()
                        .fold(0, |bits, (bit, value)| bits | u64::from(*value > 0) << bit)
                })
            })
            .collect();
        for query in rows.iter().take(5).chain(&rows[500..]) {
            let (mut fast, mut plain) = (Vec::new(), Vec::new());
            dots(query, &rows, &places, &mut fast);
            dots_plain(query, &rows, &places, &mut plain);
            assert_eq!(fast, plain);
        }
        for query in &signs[..5] {
            let (mut fast, mut plain) = (Vec::new(), Vec::new());
            distances(query, &signs, &mut fast);
            distances_plain(query, &signs, &mut plain);
            assert_eq!(fast, plain);
        }
    }

    #[test]
    fn products_at_the_extremes_do_not_overflow() {
        let (low, high) = ([-127; DIMENSIONS], [127; DIMENSIONS]);
        assert_eq!(dot(&low, &high), -256 * 127 * 127);
        assert_eq!(dot(&low, &low), 256 * 127 * 127);
    }
}
