//! The process clock in the core's terms: time since an epoch, pausable in tests.

use std::sync::OnceLock;

use adit_core::session::Moment;
use tokio::time::Instant;

static EPOCH: OnceLock<Instant> = OnceLock::new();

/// Converts between the runtime's clock and the core's moments.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    epoch: Instant,
}

impl Default for Clock {
    fn default() -> Self {
        Self {
            epoch: *EPOCH.get_or_init(Instant::now),
        }
    }
}

impl Clock {
    /// The current moment.
    #[must_use]
    pub fn now(&self) -> Moment {
        Moment(Instant::now().saturating_duration_since(self.epoch))
    }

    /// The runtime's instant of a moment.
    #[must_use]
    pub fn instant(&self, moment: Moment) -> Instant {
        self.epoch + moment.0
    }
}

/// The current moment of the process clock.
#[must_use]
pub fn moment() -> Moment {
    Clock::default().now()
}
