//! Which servers are held as peers, and when one replaces another of the same id.

use std::collections::HashMap;
use std::time::Duration;

use adit_core::ids::ServerId;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Replacements of one id within [`SWAPS_WITHIN`] after which both servers are refused.
const SWAPS_MAX: usize = 3;
/// A server that restarts this often has a fault of its own.
const SWAPS_WITHIN: Duration = Duration::from_secs(30);

/// Why a link to a server is not kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum NotKept {
    /// It leads to this server.
    #[error("the address leads to this server")]
    Own,
    /// Another server has the id of this one.
    #[error("the server there has the id of this one: give each a --server-id of its own")]
    OwnId,
    /// There is a link to that server already.
    #[error("there is a link to that server already")]
    Duplicate,
    /// Two servers have one id.
    #[error("two servers have this id and replace each other: give each a --server-id of its own")]
    TwoOfOneId,
}

/// The servers with links.
#[derive(Debug, Default)]
pub(crate) struct HeldPeers {
    held: HashMap<ServerId, Held>,
    swaps: HashMap<ServerId, Vec<Instant>>,
}

#[derive(Debug)]
struct Held {
    incarnation: u64,
    end: CancellationToken,
}

impl HeldPeers {
    /// A link to a server was opened. The token ends it: another process with the server's id has taken its place.
    ///
    /// # Errors
    /// The link is not kept.
    pub(crate) fn enter(
        &mut self,
        server: &ServerId,
        incarnation: u64,
        now: Instant,
    ) -> Result<CancellationToken, NotKept> {
        self.swaps.retain(|_, swaps| {
            let last = swaps.last();
            last.is_some_and(|last| now.duration_since(*last) < SWAPS_WITHIN)
        });
        if let Some(known) = self.held.get(server) {
            if known.incarnation == incarnation {
                return Err(NotKept::Duplicate);
            }
            known.end.cancel();
            let swaps = self.swaps.entry(server.clone()).or_default();
            swaps.retain(|swap| now.duration_since(*swap) < SWAPS_WITHIN);
            if swaps.len() < SWAPS_MAX {
                swaps.push(now);
            }
        }
        let swaps = self.swaps.get_mut(server);
        if let Some(swaps) = swaps {
            swaps.retain(|swap| now.duration_since(*swap) < SWAPS_WITHIN);
            if swaps.len() >= SWAPS_MAX {
                self.held.remove(server);
                return Err(NotKept::TwoOfOneId);
            }
            if swaps.is_empty() {
                self.swaps.remove(server);
            }
        }
        let end = CancellationToken::new();
        let held = Held {
            incarnation,
            end: end.clone(),
        };
        self.held.insert(server.clone(), held);
        Ok(end)
    }

    /// A link has ended.
    pub(crate) fn leave(&mut self, server: &ServerId, incarnation: u64) {
        let held = self.held.get(server);
        if held.is_some_and(|held| held.incarnation == incarnation) {
            self.held.remove(server);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_restarted_server_replaces_itself_and_two_of_one_id_are_refused() {
        let (mut held, id) = (HeldPeers::default(), ServerId::new("s"));
        let enter =
            |held: &mut HeldPeers, incarnation| held.enter(&id, incarnation, Instant::now());
        let first = enter(&mut held, 1).unwrap();
        assert_eq!(enter(&mut held, 1).unwrap_err(), NotKept::Duplicate);
        assert!(!first.is_cancelled());
        let second = enter(&mut held, 2).unwrap();
        assert!(first.is_cancelled(), "it was restarted");
        held.leave(&id, 1);
        assert_eq!(enter(&mut held, 2).unwrap_err(), NotKept::Duplicate);
        enter(&mut held, 1).unwrap();
        assert!(second.is_cancelled());
        assert_eq!(enter(&mut held, 2).unwrap_err(), NotKept::TwoOfOneId);
        assert_eq!(enter(&mut held, 1).unwrap_err(), NotKept::TwoOfOneId);
        tokio::time::advance(SWAPS_WITHIN).await;
        enter(&mut held, 1).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_went_away_may_come_back_with_any_incarnation() {
        let (mut held, id) = (HeldPeers::default(), ServerId::new("s"));
        for incarnation in 0..10 {
            held.enter(&id, incarnation, Instant::now()).unwrap();
            held.leave(&id, incarnation);
        }
    }
}
