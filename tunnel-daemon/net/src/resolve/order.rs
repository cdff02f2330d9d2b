//! The order in which the addresses of a name are tried.

use std::collections::HashSet;
use std::net::IpAddr;

/// IPv6 first, then the families in turn (RFC 8305); within a family the order given. Duplicates are dropped.
#[must_use]
pub fn interleave(ips: Vec<IpAddr>) -> Vec<IpAddr> {
    let total = ips.len();
    let (v6, v4): (Vec<_>, Vec<_>) = ips.into_iter().partition(IpAddr::is_ipv6);
    let (mut v6, mut v4) = (v6.into_iter(), v4.into_iter());
    let mut order = Vec::with_capacity(total);
    let mut seen = HashSet::with_capacity(total);
    loop {
        let (a, b) = (v6.next(), v4.next());
        if a.is_none() && b.is_none() {
            return order;
        }
        order.extend(a.into_iter().chain(b).filter(|ip| seen.insert(*ip)));
    }
}

/// Every order has the same chance (Fisher and Yates). `draw(n)` gives a number below `n`, n > 0.
pub(super) fn shuffle<T>(items: &mut [T], mut draw: impl FnMut(u64) -> u64) {
    for last in (1..items.len()).rev() {
        let drawn = usize::try_from(draw(last as u64 + 1)).unwrap_or(last);
        items.swap(last, drawn.min(last));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_take_turns_from_ipv6_on_and_keep_the_resolvers_order() {
        let parse = |list: &str| -> Vec<IpAddr> {
            list.split_whitespace()
                .map(|ip| ip.parse().unwrap())
                .collect()
        };
        for (resolved, order) in [
            (
                "1.1.1.1 2.2.2.2 ::a 3.3.3.3 ::b",
                "::a 1.1.1.1 ::b 2.2.2.2 3.3.3.3",
            ),
            ("1.1.1.1 1.1.1.1 2.2.2.2", "1.1.1.1 2.2.2.2"),
            ("::a ::b", "::a ::b"),
            ("", ""),
        ] {
            assert_eq!(interleave(parse(resolved)), parse(order));
        }
    }

    /// All 24 ways to draw, each of which must give another order.
    #[test]
    fn each_order_of_a_shuffle_has_the_same_chance() {
        let mut orders = HashSet::new();
        for ways in 0..24 {
            let (mut left, mut items) = (ways, [1, 2, 3, 4]);
            shuffle(&mut items, |below| {
                let drawn = left % below;
                left /= below;
                drawn
            });
            orders.insert(items);
        }
        assert_eq!(orders.len(), 24);
        shuffle(&mut [(); 0], |_| unreachable!("nothing to draw"));
        shuffle(&mut [()], |_| unreachable!("nothing to draw"));
    }
}
