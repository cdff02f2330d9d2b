//! What the clients of all frontends have together.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use crate::telemetry::rate::TokenBucket;

/// Refusals that are logged in a second in the long run, and at once: any client can cause them.
const LOGGED_PER_SECOND: u32 = 5;
const LOGGED_BURST: u32 = 50;

/// Shared by all frontends of a server.
#[derive(Debug)]
pub struct ClientLimits {
    logged: Mutex<TokenBucket>,
}

impl Default for ClientLimits {
    fn default() -> Self {
        let logged = TokenBucket::new(LOGGED_PER_SECOND, LOGGED_BURST, Instant::now());
        Self {
            logged: Mutex::new(logged),
        }
    }
}

impl ClientLimits {
    /// Whether to log one more refusal.
    pub fn may_log_refusal(&self) -> bool {
        self.may_log_at(Instant::now())
    }

    fn may_log_at(&self, now: Instant) -> bool {
        let mut logged = self.logged.lock().unwrap_or_else(PoisonError::into_inner);
        logged.try_take(now)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn of_many_refusals_five_a_second_are_logged() {
        let limits = ClientLimits::default();
        let start = Instant::now() + Duration::from_secs(1);
        let logged = |now| (0..1000).filter(|_| limits.may_log_at(now)).count();
        assert_eq!(logged(start), 50);
        assert_eq!(logged(start + Duration::from_secs(1)), 5);
    }
}
