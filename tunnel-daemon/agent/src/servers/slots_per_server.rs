//! Limits concurrent opening of lanes: a few over all servers, and at most half of them for each of several servers. A server
//! that accepts connections and never answers does not block lanes to others.

use tokio::sync::{Semaphore, SemaphorePermit};

/// Lanes opened concurrently, over all servers.
const TURNS: u32 = 4;
/// Lanes opened concurrently for each of several servers.
const TURNS_OF_ONE: u32 = TURNS / 2;

const _: () = assert!(TURNS_OF_ONE > 0, "each server has a turn");

/// The slots of one agent, or one server's share of them: with several servers each permit takes more of the share. Permits
/// already held keep their weight.
#[derive(Debug)]
pub(super) struct Slots(Semaphore);

impl Default for Slots {
    fn default() -> Self {
        Self(Semaphore::new(TURNS as usize))
    }
}

impl Slots {
    /// Waits for a slot for the server of `share`, one of `servers`; it is released when dropped. A cancelled call takes none.
    /// `None` would mean a closed semaphore, and neither is ever closed.
    pub(super) async fn take<'a>(
        &'a self,
        share: &'a Self,
        servers: usize,
    ) -> Option<[SemaphorePermit<'a>; 2]> {
        let permits = if servers > 1 { TURNS / TURNS_OF_ONE } else { 1 };
        // The share first: waiting for the share blocks no other server.
        let of_server = share.0.acquire_many(permits).await.ok()?;
        Some([of_server, self.0.acquire().await.ok()?])
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    /// All permits that are available now.
    fn all<'a>(
        limit: &'a Slots,
        share: &'a Slots,
        servers: usize,
    ) -> Vec<[SemaphorePermit<'a>; 2]> {
        std::iter::from_fn(|| limit.take(share, servers).now_or_never()?).collect()
    }

    /// Limit (peers): Lanes that an agent opens at once | 4; 2 to one of several servers
    #[test]
    fn an_unresponsive_server_gets_half_of_the_slots_beside_other_servers() {
        let (limit, silent, other) = (Slots::default(), Slots::default(), Slots::default());
        let held = all(&limit, &silent, 2);
        assert_eq!(held.len(), 2);
        for _again in 0..3 {
            assert_eq!(all(&limit, &other, 2).len(), 2);
        }
        drop(held);
        assert_eq!(all(&limit, &other, 1).len(), 4, "the only server has all");
    }

    #[test]
    fn the_first_slot_freed_by_a_single_server_goes_to_the_next_server() {
        let (limit, first, second) = (Slots::default(), Slots::default(), Slots::default());
        let mut held = all(&limit, &first, 1);
        assert_eq!(held.len(), 4);
        held.pop();
        assert_eq!(all(&limit, &first, 2).len(), 0);
        assert_eq!(all(&limit, &second, 2).len(), 1);
    }
}
