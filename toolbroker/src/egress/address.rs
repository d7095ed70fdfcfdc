//! Which network addresses a tool may reach.
//!
//! An address counts as public only if it is plainly that: IPv4 outside every
//! range of the IANA special-purpose registry (RFC 6890) that is not for the
//! whole Internet, and IPv6 inside 2000::/3 outside such ranges. So a form
//! that carries an IPv4 address in an IPv6 one (mapped, compatible, 6to4,
//! NAT64, Teredo) is refused whatever it carries, and a range that is given
//! out tomorrow is refused until somebody looks at it.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Addresses that have the first `prefix_bits` bits in common.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct AddressRange {
    first: IpAddr,
    prefix_bits: u8,
}

const fn v4(a: u8, b: u8, c: u8, d: u8, prefix_bits: u8) -> AddressRange {
    AddressRange { first: IpAddr::V4(Ipv4Addr::new(a, b, c, d)), prefix_bits }
}

const fn v6(first: [u16; 4], prefix_bits: u8) -> AddressRange {
    let [a, b, c, d] = first;
    AddressRange { first: IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0)), prefix_bits }
}

/// IPv4 that is not the Internet, and what it is.
const SPECIAL_V4: [(AddressRange, &str); 16] = [
    (v4(0, 0, 0, 0, 8), "this network"),
    (v4(10, 0, 0, 0, 8), "private"),
    (v4(100, 64, 0, 0, 10), "shared by a carrier's customers"),
    (v4(127, 0, 0, 0, 8), "loopback"),
    // The platform's own services at one large provider: public by number.
    (v4(168, 63, 129, 16, 32), "a cloud platform's own"),
    (v4(169, 254, 0, 0, 16), "link-local, where clouds keep their metadata"),
    (v4(172, 16, 0, 0, 12), "private"),
    (v4(192, 0, 0, 0, 24), "for protocol assignments"),
    (v4(192, 0, 2, 0, 24), "for documentation"),
    (v4(192, 88, 99, 0, 24), "6to4 relays"),
    (v4(192, 168, 0, 0, 16), "private"),
    (v4(198, 18, 0, 0, 15), "for benchmarks"),
    (v4(198, 51, 100, 0, 24), "for documentation"),
    (v4(203, 0, 113, 0, 24), "for documentation"),
    (v4(224, 0, 0, 0, 4), "multicast"),
    // With the broadcast address.
    (v4(240, 0, 0, 0, 4), "reserved or broadcast"),
];

/// All IPv6 that is given out for the Internet.
const GLOBAL_V6: AddressRange = v6([0x2000, 0, 0, 0], 3);

/// What of it is something else.
const SPECIAL_V6: [(AddressRange, &str); 4] = [
    // With Teredo (2001::/32) and ORCHID.
    (v6([0x2001, 0, 0, 0], 23), "for protocol assignments or Teredo"),
    (v6([0x2001, 0x0DB8, 0, 0], 32), "for documentation"),
    (v6([0x2002, 0, 0, 0], 16), "6to4, which carries an IPv4 address"),
    (v6([0x3FFF, 0, 0, 0], 20), "for documentation"),
];

/// Names for what lies outside [`GLOBAL_V6`]; whatever has none is refused
/// all the same.
const NAMED_V6: [(AddressRange, &str); 5] = [
    (v6([0x0064, 0xFF9B, 0, 0], 32), "NAT64, which carries an IPv4 address"),
    (v6([0xFC00, 0, 0, 0], 7), "unique local"),
    (v6([0xFE80, 0, 0, 0], 10), "link-local"),
    (v6([0xFEC0, 0, 0, 0], 10), "site-local"),
    (v6([0xFF00, 0, 0, 0], 8), "multicast"),
];

/// What is special about an address; `None` for a public one.
#[must_use]
pub fn special(address: IpAddr) -> Option<&'static str> {
    let named = |ranges: &[(AddressRange, &'static str)]| {
        ranges.iter().find(|(range, _)| range.contains(address)).map(|(_, what)| *what)
    };
    match address {
        IpAddr::V4(_) => named(&SPECIAL_V4),
        IpAddr::V6(_) if GLOBAL_V6.contains(address) => named(&SPECIAL_V6),
        IpAddr::V6(six) => Some(match six {
            Ipv6Addr::UNSPECIFIED => "unspecified",
            Ipv6Addr::LOCALHOST => "loopback",
            _ if six.to_ipv4().is_some() => "an IPv4 address in the form of IPv6",
            _ => named(&NAMED_V6).unwrap_or("not given out for the Internet"),
        }),
    }
}

impl AddressRange {
    /// Reads `address/bits`, or an address alone for a range of one. `None`
    /// if it is neither, or if bits are set behind the prefix: such a range
    /// does not say what its writer meant.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits)),
            None => (text, None),
        };
        let first: IpAddr = address.parse().ok()?;
        let bits_max = if first.is_ipv4() { 32 } else { 128 };
        let prefix_bits = match bits {
            None => bits_max,
            Some(bits) if bits.bytes().all(|byte| byte.is_ascii_digit()) => bits.parse().ok()?,
            Some(_) => return None,
        };
        let range = Self { first, prefix_bits };
        (prefix_bits <= bits_max && bits_of(first) & !range.mask() == 0).then_some(range)
    }

    /// Whether an address lies in it. An IPv4 address in the form of IPv6
    /// lies in no range of IPv4.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        address.is_ipv4() == self.first.is_ipv4()
            && bits_of(address) & self.mask() == bits_of(self.first)
    }

    fn mask(&self) -> u128 {
        let width: u32 = if self.first.is_ipv4() { 32 } else { 128 };
        let free = width - u32::from(self.prefix_bits).min(width);
        u128::MAX.checked_shl(free).unwrap_or(0)
    }
}

fn bits_of(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(four) => u32::from(four).into(),
        IpAddr::V6(six) => six.into(),
    }
}

impl fmt::Display for AddressRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.first, self.prefix_bits)
    }
}

impl fmt::Debug for AddressRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_special(address: &str) -> bool {
        special(address.parse().unwrap()).is_some()
    }

    #[test]
    fn every_range_that_is_not_the_internet_is_special_from_end_to_end() {
        for (first, last) in [
            ("0.0.0.0", "0.255.255.255"),
            ("10.0.0.0", "10.255.255.255"),
            ("100.64.0.0", "100.127.255.255"),
            ("127.0.0.0", "127.255.255.255"),
            ("168.63.129.16", "168.63.129.16"),
            ("169.254.0.0", "169.254.255.255"),
            ("172.16.0.0", "172.31.255.255"),
            ("192.0.0.0", "192.0.0.255"),
            ("192.0.2.0", "192.0.2.255"),
            ("192.88.99.0", "192.88.99.255"),
            ("192.168.0.0", "192.168.255.255"),
            ("198.18.0.0", "198.19.255.255"),
            ("198.51.100.0", "198.51.100.255"),
            ("203.0.113.0", "203.0.113.255"),
            ("224.0.0.0", "239.255.255.255"),
            ("240.0.0.0", "255.255.255.255"),
            ("::", "::ffff:ffff"),
            ("::ffff:0.0.0.0", "::ffff:255.255.255.255"),
            ("64:ff9b::", "64:ff9b::ffff:ffff"),
            ("64:ff9b:1::", "64:ff9b:1:ffff:ffff:ffff:ffff:ffff"),
            ("100::", "100::ffff"),
            ("2001::", "2001:1ff:ffff:ffff:ffff:ffff:ffff:ffff"),
            ("2001:db8::", "2001:db8:ffff:ffff:ffff:ffff:ffff:ffff"),
            ("2002::", "2002:ffff:ffff:ffff:ffff:ffff:ffff:ffff"),
            ("3fff::", "3fff:fff:ffff:ffff:ffff:ffff:ffff:ffff"),
            ("5f00::", "5f00:ffff::"),
            ("fc00::", "fdff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"),
            ("fe80::", "febf:ffff:ffff:ffff:ffff:ffff:ffff:ffff"),
            ("fec0::", "feff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"),
            ("ff00::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"),
        ] {
            assert!(is_special(first) && is_special(last), "{first} to {last}");
        }
    }

    #[test]
    fn the_addresses_beside_those_ranges_are_public() {
        for public in [
            "1.0.0.0",
            "9.255.255.255",
            "11.0.0.0",
            "100.63.255.255",
            "100.128.0.0",
            "126.255.255.255",
            "128.0.0.0",
            "168.63.129.15",
            "168.63.129.17",
            "169.253.255.255",
            "169.255.0.0",
            "172.15.255.255",
            "172.32.0.0",
            "192.0.1.0",
            "192.167.255.255",
            "192.169.0.0",
            "198.17.255.255",
            "198.20.0.0",
            "223.255.255.255",
            "2001:200::",
            "2001:4860:4860::8888",
            "2003::",
            "2600::",
            "3ffe:ffff::",
        ] {
            assert!(!is_special(public), "{public}");
        }
    }

    #[test]
    fn a_metadata_address_in_any_form_of_ipv6_is_special() {
        for form in [
            "::ffff:169.254.169.254",
            "::169.254.169.254",
            "64:ff9b::169.254.169.254",
            "2002:a9fe:a9fe::",
            "2001:0:a9fe:a9fe::",
            "fd00:ec2::254",
        ] {
            assert!(is_special(form), "{form}");
        }
    }

    #[test]
    fn a_range_is_read_strictly_and_holds_what_it_says() {
        let range = AddressRange::parse("10.1.0.0/16").unwrap();
        assert!(range.contains("10.1.255.255".parse().unwrap()));
        assert!(!range.contains("10.2.0.0".parse().unwrap()));
        assert!(!range.contains("::ffff:10.1.0.0".parse().unwrap()));
        assert!(!range.contains("::10.1.0.0".parse().unwrap()));
        assert!(!AddressRange::parse("::/96").unwrap().contains("10.1.0.0".parse().unwrap()));
        assert!(AddressRange::parse("::1").unwrap().contains(Ipv6Addr::LOCALHOST.into()));
        assert!(AddressRange::parse("0.0.0.0/0").unwrap().contains(Ipv4Addr::LOCALHOST.into()));
        assert!(AddressRange::parse("::/0").unwrap().contains(Ipv6Addr::LOCALHOST.into()));
        for wrong in ["", "10.1.0.0/8", "10.0.0.0/33", "::/129", "10.0.0.0/+8", "10/8", "a", "::1/"]
        {
            assert_eq!(AddressRange::parse(wrong), None, "{wrong}");
        }
        assert_eq!(range.to_string(), "10.1.0.0/16");
    }
}
