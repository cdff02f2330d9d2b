//! Events of certificate files in use: reloads, and when certificates expire.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use adit_server::backend::AgentAuthorizer;
use adit_telemetry::AditMetrics;
use adit_telemetry::labels::{CertificateKind, ReloadResult};
use adit_tls::inspect::{Expiry, days_left};
use adit_tls::reload::ReloadEvents;
use adit_tls::tls::TlsError;

/// The log's name for the agent listener's files.
pub(super) const AGENT_LISTENER: &str = "agent listener";

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// A certificate is warned about once a day when less than this time is left...
const WARNED_BEFORE: Duration = Duration::from_secs(14 * 24 * 60 * 60);
/// ... and less than this part of its lifetime: short-lived certificates are renewed late.
const WARNED_PART: u32 = 3;

/// Counts and logs reloads of TLS files, and reports when certificates in use expire.
pub(super) struct CertificateEvents {
    metrics: AditMetrics,
    /// Reauthorizes agents when the files of their listener change.
    authorizer: Option<AgentAuthorizer>,
    warnings: Mutex<Warnings>,
}

impl CertificateEvents {
    pub(super) fn new(metrics: AditMetrics, authorizer: Option<AgentAuthorizer>) -> Self {
        Self {
            metrics,
            authorizer,
            warnings: Mutex::default(),
        }
    }
}

impl ReloadEvents for CertificateEvents {
    fn loaded(&self, name: &'static str) {
        tracing::info!(files = name, "new TLS files are in use");
        self.metrics.tls_reload(ReloadResult::Ok);
        if let (AGENT_LISTENER, Some(authorizer)) = (name, &self.authorizer) {
            authorizer.tls_changed();
        }
    }

    fn restored(&self, name: &'static str) {
        tracing::info!(files = name, "TLS files are again as they were when loaded");
        self.metrics.tls_reload(ReloadResult::Ok);
    }

    fn failed(&self, name: &'static str, error: &TlsError) {
        tracing::error!(files = name, %error, "new TLS files are broken; the old ones stay in use");
        self.metrics.tls_reload(ReloadResult::Failed);
    }

    #[expect(clippy::disallowed_methods, reason = "certificates have dates")]
    fn expiries(&self, expiries: &[Expiry]) {
        let now = SystemTime::now();
        let mut warnings = self.warnings.lock().unwrap_or_else(PoisonError::into_inner);
        for expiry in expiries {
            let file = expiry.path.display().to_string();
            let since = expiry.not_after.duration_since(UNIX_EPOCH);
            let seconds = since.map_or(0, |since| since.as_secs());
            let kind = if expiry.is_ca {
                CertificateKind::Ca
            } else {
                CertificateKind::Certificate
            };
            self.metrics.certificate_expiry(&file, kind, seconds);
            match warnings.due(expiry, now) {
                None => (),
                Some(Due::Soon { days_left }) => {
                    tracing::warn!(file, days_left, "certificate expires soon");
                }
                Some(Due::Expired) => tracing::error!(file, "certificate has expired"),
            }
        }
    }
}

/// The warning due for a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Due {
    Soon { days_left: u64 },
    Expired,
}

/// When each file was last warned about.
#[derive(Default)]
struct Warnings(BTreeMap<PathBuf, SystemTime>);

impl Warnings {
    fn due(&mut self, expiry: &Expiry, now: SystemTime) -> Option<Due> {
        let left = expiry.not_after.duration_since(now).ok();
        let warned_before = WARNED_BEFORE.min(expiry.lifetime / WARNED_PART);
        if left.is_some_and(|left| left >= warned_before) {
            self.0.remove(&expiry.path);
            return None;
        }
        let is_recent = |last: &SystemTime| now.duration_since(*last).is_ok_and(|ago| ago < DAY);
        if self.0.get(&expiry.path).is_some_and(is_recent) {
            return None;
        }
        self.0.insert(expiry.path.clone(), now);
        let days_left = days_left(expiry.not_after, now);
        Some(days_left.map_or(Due::Expired, |days_left| Due::Soon { days_left }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: SystemTime = UNIX_EPOCH;

    fn expiry(lifetime: Duration) -> Expiry {
        Expiry {
            path: PathBuf::from("tls.crt"),
            is_ca: false,
            not_after: START + lifetime,
            lifetime,
        }
    }

    #[test]
    fn a_file_is_warned_about_once_a_day_in_its_last_two_weeks() {
        let (year, mut warnings) = (expiry(365 * DAY), Warnings::default());
        let mut at =
            |days: u32, hours: u32| warnings.due(&year, START + days * DAY + hours * DAY / 24);
        assert_eq!(at(0, 0), None);
        assert_eq!(at(351, 0), None);
        assert_eq!(at(351, 1), Some(Due::Soon { days_left: 13 }));
        assert_eq!(at(351, 2), None);
        assert_eq!(at(352, 0), None);
        assert_eq!(at(352, 1), Some(Due::Soon { days_left: 12 }));
        assert_eq!(at(365, 1), Some(Due::Expired));
        assert_eq!(at(365, 9), None);
        assert_eq!(at(366, 2), Some(Due::Expired));
    }

    #[test]
    fn a_renewed_file_is_warned_about_when_its_own_time_comes() {
        let mut warnings = Warnings::default();
        let year = expiry(365 * DAY);
        assert!(warnings.due(&year, START + 360 * DAY).is_some());
        let renewed = Expiry {
            not_after: START + 700 * DAY,
            ..year.clone()
        };
        assert_eq!(warnings.due(&renewed, START + 360 * DAY), None);
        assert!(warnings.due(&year, START + 360 * DAY).is_some());
    }

    #[test]
    fn short_lived_certificates_have_a_third_of_their_life_for_renewal() {
        let mut warnings = Warnings::default();
        let day = expiry(DAY);
        assert_eq!(warnings.due(&day, START + DAY / 2), None);
        assert_eq!(
            warnings.due(&day, START + DAY * 3 / 4),
            Some(Due::Soon { days_left: 0 })
        );
    }
}
