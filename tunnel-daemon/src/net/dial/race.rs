//! Happy eyeballs (RFC 8305): the order of addresses, and the race of connects over them.

use std::collections::HashSet;
use std::future::poll_fn;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::sleep;

/// Time that one attempt has before the next one starts beside it; Go's value.
pub(super) const STAGGER: Duration = Duration::from_millis(300);

/// IPv6 first, then the families in turn; within a family the resolver's order. Duplicates are dropped.
pub(super) fn interleave(ips: Vec<IpAddr>) -> Vec<IpAddr> {
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

/// Attempts the addresses in order, the next one after [`STAGGER`] or as soon as one failed. Returns the
/// first success and drops the other attempts, or all failures in the order they came.
pub(super) async fn first_to_connect<T, E, F>(
    addrs: Vec<SocketAddr>,
    attempt: impl Fn(SocketAddr) -> F,
) -> Result<T, Vec<(SocketAddr, E)>>
where
    F: Future<Output = Result<T, E>>,
{
    let mut waiting = addrs.into_iter();
    let mut running = Running {
        attempts: Vec::new(),
    };
    let mut failures = Vec::new();
    loop {
        match waiting.next() {
            Some(addr) => running.attempts.push((addr, Box::pin(attempt(addr)))),
            None if running.attempts.is_empty() => return Err(failures),
            None => (),
        }
        tokio::select! {
            biased;
            (addr, result) = poll_fn(|cx| running.poll_done(cx)) => match result {
                Ok(connected) => return Ok(connected),
                Err(failure) => failures.push((addr, failure)),
            },
            () = sleep(STAGGER), if waiting.len() > 0 => (),
        }
    }
}

struct Running<F> {
    attempts: Vec<(SocketAddr, Pin<Box<F>>)>,
}

impl<F: Future> Running<F> {
    /// Ready with the first attempt that is done, which is then forgotten.
    fn poll_done(&mut self, cx: &mut Context<'_>) -> Poll<(SocketAddr, F::Output)> {
        let done =
            self.attempts
                .iter_mut()
                .enumerate()
                .find_map(|(at, (_, attempt))| match attempt.as_mut().poll(cx) {
                    Poll::Ready(output) => Some((at, output)),
                    Poll::Pending => None,
                });
        match done {
            Some((at, output)) => Poll::Ready((self.attempts.remove(at).0, output)),
            None => Poll::Pending,
        }
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
}
