//! Dials that a peer forwards: answered from agents of this server alone.

use std::time::Duration;

use adit_core::failure::DialFailure;
use adit_core::ids::LinkId;
use adit_core::peer::Forward;
use adit_core::registry::Registry;
use adit_core::session::{CancelledDial, TunnelKind};

use super::asked::AskedAgents;
use super::dial::Wanted;
use super::handle::LinkHandle;
use super::route::{OpenTunnel, Router};
use adit_config::limits;
use adit_tunnel::Carrier;
use adit_tunnel::clock::moment;

/// Why a forwarded dial opened no tunnel.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NotForwarded {
    /// No agent here under that key; nobody was asked.
    #[error("no agent here under that key")]
    NotHere,
    /// The agents here under that key take no dials now, or are another owner's; nobody was asked.
    #[error("no agent here under that key takes the dial now")]
    Busy,
    /// This server goes away; nobody was asked.
    #[error("this server goes away")]
    Leaving,
    /// The dial failed.
    #[error(transparent)]
    Failed(DialFailure),
}

impl Router {
    /// Dials for a peer, under the key that it names and no other. The dial is neither hedged nor parked: the peer does that.
    /// `hash`: hash of what an agent has proved, as peers make it. A dropped call cancels the dial.
    ///
    /// # Errors
    /// See [`NotForwarded`].
    pub async fn dial_forwarded(
        &self,
        (protocol, address): (&str, &str),
        forward: &Forward,
        hash: &(dyn Fn(Option<&str>) -> u64 + Sync),
        asked: &AskedAgents,
    ) -> Result<OpenTunnel<Carrier>, NotForwarded> {
        let admitted = self.admit_dial(TunnelKind::Socket);
        let (_pending, promise) = admitted.map_err(|failure| match failure {
            DialFailure::ShuttingDown => NotForwarded::Leaving,
            failure => NotForwarded::Failed(failure),
        })?;
        if protocol.len() + address.len() > limits::DIAL_BYTES_MAX {
            return Err(NotForwarded::Failed(DialFailure::TooLong));
        }
        let dialing = self.ask_in_turn((protocol, address), forward, hash, asked);
        let limits = [self.limits.timeout, forward.time_left];
        let outcome = match limits.into_iter().flatten().min() {
            None => dialing.await,
            Some(left) => tokio::time::timeout(left.max(Duration::from_millis(1)), dialing)
                .await
                .unwrap_or(Err(NotForwarded::Failed(DialFailure::TimedOut))),
        };
        asked.conclude(match &outcome {
            Err(NotForwarded::Failed(failure)) => Some(failure),
            Ok(_) | Err(_) => None,
        });
        outcome.map(|mut open| {
            open.carrier.keep(promise);
            open
        })
    }

    /// Asks one agent, and another one only if the one before cannot have seen the dial.
    async fn ask_in_turn(
        &self,
        (protocol, address): (&str, &str),
        forward: &Forward,
        hash: &(dyn Fn(Option<&str>) -> u64 + Sync),
        asked: &AskedAgents,
    ) -> Result<OpenTunnel<Carrier>, NotForwarded> {
        let wanted = Wanted {
            dial: forward.dial,
            protocol,
            address,
            raw_lane: false,
        };
        let mut passed = Vec::new();
        while let Some(handle) = self.next_local(forward, hash, &mut passed) {
            let number = asked.add(&handle.info.agent, handle.info.identity.owner());
            let (_handle, outcome) = self.ask_agent(handle, wanted, asked, number).await;
            match outcome {
                Ok(open) => return Ok(open),
                Err(CancelledDial { written: false, .. }) => (),
                Err(CancelledDial { failure, .. }) => return Err(NotForwarded::Failed(failure)),
            }
        }
        // A key that is here and silent must not lead the dial to the next key, which may be another machine's.
        let is_here = |registry: &Registry| {
            registry.has_local(&forward.scope) || registry.is_silent(&forward.scope, moment())
        };
        Err(if self.with_registry(is_here) {
            NotForwarded::Busy
        } else {
            NotForwarded::NotHere
        })
    }

    fn next_local(
        &self,
        forward: &Forward,
        hash: &(dyn Fn(Option<&str>) -> u64 + Sync),
        passed: &mut Vec<LinkId>,
    ) -> Option<LinkHandle> {
        let is_owner =
            |principal: Option<&str>| forward.owner.is_none_or(|owner| hash(principal) == owner);
        loop {
            let draw = rand::random();
            let pick =
                |registry: &Registry| registry.pick_local(&forward.scope, &is_owner, draw, passed);
            let link = self.with_registry(pick)?;
            passed.push(link);
            // A link that is ending leaves this table before the registry.
            let Some(handle) = self.handle(link) else {
                continue;
            };
            match self.settled(&handle) {
                None => return Some(handle),
                Some(older) if passed.contains(&older.id) => (),
                Some(older) => {
                    passed.push(older.id);
                    return Some(older);
                }
            }
        }
    }
}
