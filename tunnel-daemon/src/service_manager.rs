//! Notifies systemd by sd_notify(3), over the socket that `NOTIFY_SOCKET` names. Does nothing without one.

use sd_notify::NotifyState;

/// Reports that the program serves.
pub(super) fn ready() {
    notify(NotifyState::Ready);
}

/// Reports that the program drains and will end.
pub(super) fn stopping() {
    notify(NotifyState::Stopping);
}

fn notify(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(false, &[state]) {
        tracing::warn!(%error, "the service manager does not take notifications");
    }
}
