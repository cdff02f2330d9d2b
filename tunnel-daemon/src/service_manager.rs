//! What the service manager is told: sd_notify(3) of systemd, by the socket that `NOTIFY_SOCKET` names. Without one nothing is told.

use sd_notify::NotifyState;

/// The program serves.
pub(super) fn ready() {
    tell(NotifyState::Ready);
}

/// The program drains, then ends.
pub(super) fn stopping() {
    tell(NotifyState::Stopping);
}

fn tell(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(false, &[state]) {
        tracing::warn!(%error, "the service manager does not take notifications");
    }
}
