//! Checks of Ed25519 signatures against keys that were known long before.
//!
//! A check (RFC 8032, 5.1.7, without the cofactor) computes `sB - kA` and
//! compares it with the signature's `R`. Most of it is 252 doublings of a point
//! that nobody has seen before the signature came. But `B` is a constant and `A`
//! is configuration: a [`Comb`] holds sums of their multiples by powers of two,
//! and leaves a doubling for each of its columns.
//!
//! ```text
//!  a scalar's bits, [TEETH] rows of [COLUMNS]:   the point for a column
//!                                                is the sum of its rows' points
//!   row 0   b0    b1    …  b50        P
//!   row 1   b51   b52   …  b101      2^51 P      column 1, if b1 and b103 are set:
//!   row 2   b102  b103  …  b152      2^102 P       P + 2^102 P, from the comb
//!   …
//! ```
//!
//! From the highest column down: double, add the column's point. Two scalars
//! share the doublings. Everything here is public, so the time may depend
//! on it.

use alloc::boxed::Box;
use alloc::vec::Vec;

use curve25519_dalek::Scalar;
use curve25519_dalek::constants::ED25519_BASEPOINT_POINT;
use curve25519_dalek::edwards::EdwardsPoint;
use curve25519_dalek::traits::Identity as _;
use ed25519_dalek::{Signature, VerifyingKey};
use sha2::{Digest as _, Sha512};

/// Rows. One more would save 4 us of 31 and take twice the memory, which each
/// guest has a copy of.
const TEETH: usize = 5;
/// Bits of a reduced scalar.
const SCALAR_BITS: usize = 253;
const COLUMNS: usize = SCALAR_BITS.div_ceil(TEETH);
// All rows lie within a scalar's bytes.
const _: () = assert!(TEETH * COLUMNS <= 256);

/// A sum for each choice of rows but the empty one.
const SUMS: usize = (1 << TEETH) - 1;

/// Sums of `2^(row * COLUMNS) P`, over the rows that are set in the index plus
/// one.
#[derive(Clone)]
struct Comb(Box<[EdwardsPoint; SUMS]>);

impl Comb {
    fn of(point: EdwardsPoint) -> Self {
        let mut sums = Box::new([point; SUMS]);
        let mut tooth = point;
        for row in 0..TEETH {
            if row > 0 {
                for _ in 0..COLUMNS {
                    tooth += tooth;
                }
            }
            // Without this row, this row alone, and with it.
            let lower = (1 << row) - 1;
            sums[lower] = tooth;
            for other in 0..lower {
                sums[lower + 1 + other] = sums[other] + tooth;
            }
        }
        Self(sums)
    }

    /// The point for one column of a scalar; `None` if it is the neutral one.
    fn point(&self, scalar: &Scalar, column: usize) -> Option<&EdwardsPoint> {
        let bit = |at: usize| usize::from(scalar.as_bytes()[at / 8] >> (at % 8) & 1);
        let rows = (0..TEETH).fold(0, |rows, row| rows | bit(row * COLUMNS + column) << row);
        rows.checked_sub(1).map(|index| &self.0[index])
    }
}

/// Combs of the base point and of some keys.
#[derive(Clone)]
pub(super) struct Combs {
    base: Comb,
    /// Each key with the comb of its negated point.
    keys: Vec<(VerifyingKey, Comb)>,
}

impl core::fmt::Debug for Combs {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Combs of {} keys", self.keys.len())
    }
}

impl Combs {
    /// Makes them; 40 us each. A key of small order, by which nothing verifies,
    /// gets none.
    pub(super) fn of(keys: impl Iterator<Item = VerifyingKey>) -> Self {
        let keys = keys.filter(|key| !key.is_weak());
        Self {
            base: Comb::of(ED25519_BASEPOINT_POINT),
            keys: keys.map(|key| (key, Comb::of(-key.to_edwards()))).collect(),
        }
    }

    /// Whether `signature` over `message` is by `key`: what
    /// [`VerifyingKey::verify_strict`] says. `None` if there is no comb of the key.
    pub(super) fn verify(
        &self,
        key: &VerifyingKey,
        message: &[u8],
        signature: &Signature,
    ) -> Option<bool> {
        let (key, negated_key) = self.keys.iter().find(|(of, _)| of == key)?;
        let Some(s) = Scalar::from_canonical_bytes(*signature.s_bytes()).into_option() else {
            return Some(false);
        };
        let hash = Sha512::new()
            .chain_update(signature.r_bytes())
            .chain_update(key.as_bytes())
            .chain_update(message)
            .finalize();
        let k = Scalar::from_bytes_mod_order_wide(&hash.into());
        let r = sum([(&self.base, &s), (negated_key, &k)]);
        // Where they are equal the signature's is the canonical encoding of this
        // point, so whether that one is of small order need not be asked of it.
        let equal = r.compress().as_bytes() == signature.r_bytes();
        Some(equal && !r.is_small_order())
    }
}

/// The sum of each comb's point times its scalar, which is reduced.
fn sum(terms: [(&Comb, &Scalar); 2]) -> EdwardsPoint {
    let points = |column| terms.into_iter().filter_map(move |(comb, k)| comb.point(k, column));
    // The sum below waits for each of its points, and a guest that was just made
    // finds none of them in the caches: all are on their way before it begins.
    for column in 0..COLUMNS {
        for point in points(column) {
            core::hint::black_box(*point);
        }
    }
    (0..COLUMNS).rev().fold(EdwardsPoint::identity(), |sum, column| {
        points(column).fold(sum + sum, |sum, point| sum + point)
    })
}

#[cfg(test)]
mod tests {
    use curve25519_dalek::constants::EIGHT_TORSION;
    use curve25519_dalek::edwards::CompressedEdwardsY;
    use curve25519_dalek::traits::IsIdentity as _;
    use proptest::prelude::*;

    use super::*;

    /// What both ways say of it; they must say the same.
    fn both(key: &VerifyingKey, message: &[u8], signature: &[u8; 64]) -> bool {
        let signature = Signature::from_bytes(signature);
        let strict = key.verify_strict(message, &signature).is_ok();
        let combs = Combs::of([*key].into_iter());
        let said = combs.verify(key, message, &signature);
        assert_eq!(said, (!key.is_weak()).then_some(strict), "{signature:?}");
        strict
    }

    fn k(r: CompressedEdwardsY, key: &VerifyingKey, message: &[u8]) -> Scalar {
        let hash = Sha512::new()
            .chain_update(r.as_bytes())
            .chain_update(key.as_bytes())
            .chain_update(message)
            .finalize();
        Scalar::from_bytes_mod_order_wide(&hash.into())
    }

    fn signature(r: CompressedEdwardsY, s: &Scalar) -> [u8; 64] {
        Signature::from_components(r.to_bytes(), s.to_bytes()).to_bytes()
    }

    fn key_of(point: &EdwardsPoint) -> VerifyingKey {
        VerifyingKey::from_bytes(point.compress().as_bytes()).unwrap()
    }

    fn scalar() -> impl Strategy<Value = Scalar> {
        any::<[u8; 64]>().prop_map(|bytes| Scalar::from_bytes_mod_order_wide(&bytes))
    }

    proptest! {
        #[test]
        fn a_comb_multiplies(a in scalar(), b in scalar(), at in scalar()) {
            let point = EdwardsPoint::mul_base(&at);
            let (base, other) = (Comb::of(ED25519_BASEPOINT_POINT), Comb::of(point));
            let expected = EdwardsPoint::mul_base(&a) + point * b;
            prop_assert_eq!(sum([(&base, &a), (&other, &b)]), expected);
        }

        /// Also where key and `R` have a part of small order, of which a check with
        /// the cofactor would see nothing: such signatures are good for some
        /// messages and not for others.
        #[test]
        fn both_ways_agree_on_parts_of_small_order(
            secret in scalar(),
            nonce in scalar(),
            of_key in 0..8usize,
            of_r in 0..8usize,
            message in any::<[u8; 42]>(),
        ) {
            let key = key_of(&(EdwardsPoint::mul_base(&secret) + EIGHT_TORSION[of_key]));
            let r = EdwardsPoint::mul_base(&nonce) + EIGHT_TORSION[of_r];
            let r = r.compress();
            let s = nonce + k(r, &key, &message) * secret;
            let good = both(&key, &message, &signature(r, &s));
            prop_assert!(good || of_key != 0 || of_r != 0, "what is signed verifies");
        }

        #[test]
        fn both_ways_agree_on_what_was_changed(
            secret in any::<[u8; 32]>(),
            message in any::<[u8; 42]>(),
            bit in 0..64 * 8usize,
            of_message in 0..42 * 8usize,
        ) {
            use ed25519_dalek::Signer as _;
            let signer = ed25519_dalek::SigningKey::from_bytes(&secret);
            let key = signer.verifying_key();
            let good = signer.sign(&message).to_bytes();
            prop_assert!(both(&key, &message, &good));
            let mut changed = good;
            changed[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(!both(&key, &message, &changed));
            let mut other = message;
            other[of_message / 8] ^= 1 << (of_message % 8);
            prop_assert!(!both(&key, &other, &good));
        }
    }

    #[test]
    fn scalars_at_their_ends_multiply() {
        let base = Comb::of(ED25519_BASEPOINT_POINT);
        for scalar in [Scalar::ZERO, Scalar::ONE, -Scalar::ONE] {
            let expected = ED25519_BASEPOINT_POINT * scalar + ED25519_BASEPOINT_POINT;
            assert_eq!(sum([(&base, &scalar), (&base, &Scalar::ONE)]), expected);
        }
    }

    #[test]
    fn a_scalar_that_is_not_reduced_is_refused() {
        use ed25519_dalek::Signer as _;
        // The order of the base point, little-endian.
        const ORDER: [u8; 32] = [
            0xed, 0xd3, 0xf5, 0x5c, 0x1a, 0x63, 0x12, 0x58, 0xd6, 0x9c, 0xf7, 0xa2, 0xde, 0xf9,
            0xde, 0x14, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x10,
        ];
        let signer = ed25519_dalek::SigningKey::from_bytes(&[7; 32]);
        let key = signer.verifying_key();
        let mut bytes = signer.sign(b"message").to_bytes();
        assert!(both(&key, b"message", &bytes));
        let mut carry = 0;
        for (byte, order) in bytes[32..].iter_mut().zip(ORDER) {
            let sum = u16::from(*byte) + u16::from(order) + carry;
            (*byte, carry) = (sum as u8, sum >> 8);
        }
        assert!(!both(&key, b"message", &bytes), "s and the order: the same point");
    }

    #[test]
    fn an_r_of_small_order_is_refused_also_where_the_equation_holds() {
        let secret = Scalar::from(77u64);
        let mut held = [0; 2];
        for of_key in EIGHT_TORSION {
            let key = key_of(&(EdwardsPoint::mul_base(&secret) + of_key));
            for (number, r) in (0..32u8).flat_map(|n| EIGHT_TORSION.map(|r| (n, r))) {
                // sB - kA is -k times the key's part of small order then, and that is
                // `R` for some messages.
                let k = k(r.compress(), &key, &[number]);
                held[usize::from(!r.is_identity())] += u32::from(-(of_key * k) == r);
                assert!(!both(&key, &[number], &signature(r.compress(), &(k * secret))));
            }
        }
        assert!(held.iter().all(|count| *count > 10), "{held:?}");
    }

    /// The field's modulus is 2^255 - 19, so these are y of 0 and 1 once more, with
    /// each sign, and y of 1 and -1 with the sign that they have not. They stand
    /// for points of small order; of those of another order that have a second
    /// encoding nobody knows a signature.
    #[test]
    fn an_r_of_small_order_in_another_encoding_is_refused() {
        let secret = Scalar::from(77u64);
        let key = key_of(&EdwardsPoint::mul_base(&secret));
        for (low, middle, high) in [
            (0xed, 0xff, 0x7f),
            (0xed, 0xff, 0xff),
            (0xee, 0xff, 0x7f),
            (0xee, 0xff, 0xff),
            (0x01, 0x00, 0x80),
            (0xec, 0xff, 0xff),
        ] {
            let mut encoding = [middle; 32];
            (encoding[0], encoding[31]) = (low, high);
            let r = CompressedEdwardsY(encoding);
            assert!(r.decompress().unwrap().is_small_order());
            let s = k(r, &key, b"message") * secret;
            assert!(!both(&key, b"message", &signature(r, &s)));
        }
    }

    #[test]
    fn a_key_of_small_order_signs_nothing() {
        for point in EIGHT_TORSION {
            let key = key_of(&point);
            for r in [point, EdwardsPoint::mul_base(&Scalar::from(5u64))] {
                for s in [Scalar::ZERO, Scalar::from(5u64)] {
                    assert!(!both(&key, b"message", &signature(r.compress(), &s)));
                }
            }
        }
        // And where its point has two encodings.
        let identity_again = CompressedEdwardsY({
            let mut bytes = [0xff; 32];
            (bytes[0], bytes[31]) = (0xee, 0x7f);
            bytes
        });
        let key = VerifyingKey::from_bytes(identity_again.as_bytes()).unwrap();
        let r = EdwardsPoint::identity().compress();
        assert!(!both(&key, b"message", &signature(r, &Scalar::ZERO)));
    }

    #[test]
    fn a_key_without_a_comb_is_not_judged() {
        let [one, other] = [5u64, 6].map(|a| key_of(&EdwardsPoint::mul_base(&Scalar::from(a))));
        let combs = Combs::of([one].into_iter());
        assert!(combs.verify(&other, b"", &Signature::from_bytes(&[0; 64])).is_none());
    }
}
