//! Events of certificate files in use: reloads, and when certificates expire.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use adit_kube::access::Api;
use adit_server::backend::AgentAuthorizer;
use adit_telemetry::AditMetrics;
use adit_telemetry::labels::{CertificateKind, Label as _, ReloadResult};
use adit_tls::inspect::{Expiry, days_left};
use adit_tls::reload::{POLL_PERIOD, ReloadEvents};
use adit_tls::reread::Reread;
use adit_tls::tls::TlsError;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::status::model::CertificateStatus;

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
    /// Reauthorizes agents or peers when the files of their listener change.
    authorizers: Vec<(&'static str, AgentAuthorizer)>,
    warnings: Mutex<Warnings>,
    table: Arc<CertificateTable>,
}

impl CertificateEvents {
    pub(super) fn new(
        metrics: AditMetrics,
        authorizers: Vec<(&'static str, AgentAuthorizer)>,
    ) -> Self {
        Self {
            metrics,
            authorizers,
            warnings: Mutex::default(),
            table: Arc::default(),
        }
    }

    /// The certificates in use.
    pub(super) fn table(&self) -> &Arc<CertificateTable> {
        &self.table
    }
}

impl ReloadEvents for CertificateEvents {
    fn loaded(&self, name: &'static str) {
        tracing::info!(files = name, "new TLS files are in use");
        self.metrics.tls_reloads.count(ReloadResult::Ok);
        let of_name = self.authorizers.iter().filter(|(of, _)| *of == name);
        for (_, authorizer) in of_name {
            authorizer.changed();
        }
    }

    fn restored(&self, name: &'static str) {
        tracing::info!(files = name, "TLS files are again as they were when loaded");
        self.metrics.tls_reloads.count(ReloadResult::Ok);
    }

    fn failed(&self, name: &'static str, error: &TlsError) {
        tracing::error!(files = name, %error, "new TLS files are broken; the old ones stay in use");
        self.metrics.tls_reloads.count(ReloadResult::Failed);
    }

    fn stuck(&self, _name: &'static str) {
        // The reader of the files has logged their names.
        self.metrics.tls_reloads.count(ReloadResult::Failed);
    }

    #[expect(clippy::disallowed_methods, reason = "certificates have dates")]
    fn expiries(&self, expiries: &[Expiry]) {
        let now = SystemTime::now();
        let mut warnings = self.warnings.lock().unwrap_or_else(PoisonError::into_inner);
        for expiry in expiries {
            self.table.set(expiry);
            let file = expiry.path.display().to_string();
            let since = expiry.not_after.duration_since(UNIX_EPOCH);
            let seconds = since.map_or(0, |since| since.as_secs());
            self.metrics
                .certificate_expiry(&file, kind(expiry), seconds);
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

impl CertificateEvents {
    /// Forgets a file that is no longer in use.
    fn gone(&self, expiry: &Expiry) {
        self.table.remove(expiry);
        let file = expiry.path.display().to_string();
        self.metrics.certificate_gone(&file, kind(expiry));
        let mut warnings = self.warnings.lock().unwrap_or_else(PoisonError::into_inner);
        warnings.0.remove(&expiry.path);
    }
}

/// When each certificate in use expires, by file and kind: for status output.
#[derive(Default)]
pub(super) struct CertificateTable(Mutex<BTreeMap<(PathBuf, &'static str), SystemTime>>);

impl CertificateTable {
    fn set(&self, expiry: &Expiry) {
        self.lock().insert(Self::key(expiry), expiry.not_after);
    }

    fn remove(&self, expiry: &Expiry) {
        self.lock().remove(&Self::key(expiry));
    }

    /// All certificates, those that expire first at the front.
    #[expect(clippy::disallowed_methods, reason = "certificates have dates")]
    pub(super) fn rows(&self) -> Vec<CertificateStatus> {
        self.rows_at(SystemTime::now())
    }

    fn rows_at(&self, now: SystemTime) -> Vec<CertificateStatus> {
        let table = self.lock();
        let mut rows: Vec<CertificateStatus> = table
            .iter()
            .map(|((path, kind), not_after)| CertificateStatus {
                file: path.display().to_string(),
                kind: (*kind).to_owned(),
                expires: not_after
                    .duration_since(UNIX_EPOCH)
                    .map_or(0, |since| since.as_secs()),
                days_left: days_left(*not_after, now),
            })
            .collect();
        rows.sort_by_key(|row| row.expires);
        rows
    }

    fn key(expiry: &Expiry) -> (PathBuf, &'static str) {
        (expiry.path.clone(), kind(expiry).as_str())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<(PathBuf, &'static str), SystemTime>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn kind(expiry: &Expiry) -> CertificateKind {
    if expiry.is_ca {
        CertificateKind::Ca
    } else {
        CertificateKind::Certificate
    }
}

/// Reports the expiry of a kubeconfig's client certificate under the kubeconfig's path, until `stop`. Requests to the API server
/// check the files for changes themselves, so this task checks once a poll period and when `reread` asks.
pub(super) async fn watch_kubeconfig(
    api: Arc<Api>,
    events: Arc<CertificateEvents>,
    reread: Reread,
    stop: CancellationToken,
) {
    let asked = Arc::new(Notify::new());
    reread.tell(&asked);
    let mut before: Option<Expiry> = None;
    loop {
        let found = api.client_certificate().await;
        let now = found.and_then(|(path, pem)| Expiry::of(path, &pem));
        if let Some(old) = before
            && now.as_ref().map(kind) != Some(kind(&old))
        {
            events.gone(&old);
        }
        events.expiries(now.as_slice());
        before = now;
        tokio::select! {
            () = stop.cancelled() => return,
            () = asked.notified() => (),
            () = tokio::time::sleep(POLL_PERIOD) => (),
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
    use std::path::Path;

    use adit_kube::access::Source;
    use adit_telemetry::AgentMetrics;
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    use serde_json::{Value, json};

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
    fn expiry_warnings_are_daily_from_two_weeks_before() {
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
    fn the_table_lists_certificates_by_expiry_and_forgets_those_out_of_use() {
        let (metrics, folder) = (AgentMetrics::new(), PathBuf::from("/etc/adit"));
        let events = CertificateEvents::new(metrics.adit().clone(), Vec::new());
        let of = |name: &str, days: u32| Expiry {
            path: folder.join(name),
            ..expiry(days * DAY)
        };
        let [late, soon, over] = [of("a", 30), of("b", 13), of("c", 1)];
        events.expiries(&[late, soon, over.clone()]);
        let rows = |now| {
            let rows = events.table().rows_at(now).into_iter();
            rows.map(|row| (row.file, row.days_left))
                .collect::<Vec<_>>()
        };
        let row = |name: &str, left| (format!("/etc/adit/{name}"), left);
        let now = START + 2 * DAY;
        assert_eq!(
            rows(now),
            [row("c", None), row("b", Some(11)), row("a", Some(28))]
        );
        events.gone(&over);
        assert_eq!(rows(now).len(), 2);
    }

    #[test]
    fn a_renewed_certificate_has_its_own_expiry_warnings() {
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
    fn short_lived_certificates_are_warned_about_in_their_last_third() {
        let mut warnings = Warnings::default();
        let day = expiry(DAY);
        assert_eq!(warnings.due(&day, START + DAY / 2), None);
        assert_eq!(
            warnings.due(&day, START + DAY * 3 / 4),
            Some(Due::Soon { days_left: 0 })
        );
    }

    /// A certificate that is valid until the start of `year`, and its key, as PEM.
    fn until_year(year: i32) -> [String; 2] {
        let mut params = rcgen::CertificateParams::new(vec!["client".to_owned()]).unwrap();
        params.not_after = rcgen::date_time_ymd(year, 1, 1);
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        [certificate.pem(), key.serialize_pem()]
    }

    /// A kubeconfig of an API server that receives no request.
    fn write_kubeconfig(file: &Path, user: &Value) {
        let config = json!({
            "current-context": "a",
            "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
            "clusters": [{"name": "a", "cluster": {"server": "https://127.0.0.1:1"}}],
            "users": [{"name": "a", "user": user}],
        });
        std::fs::write(file, config.to_string()).unwrap();
    }

    /// A certificate embedded in the kubeconfig, in files that it names, renewed, and removed.
    #[tokio::test(start_paused = true)]
    async fn client_certificates_of_a_kubeconfig_are_reported_under_its_path() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("kubeconfig");
        let [certificate, key] = until_year(2100).map(|pem| STANDARD.encode(pem));
        let embedded = json!({"client-certificate-data": certificate, "client-key-data": key});
        write_kubeconfig(&file, &embedded);
        let write_pair = |year| {
            let [certificate, key] = until_year(year);
            std::fs::write(folder.path().join("client.crt"), certificate).unwrap();
            std::fs::write(folder.path().join("client.key"), key).unwrap();
        };

        let metrics = AgentMetrics::new();
        let events = Arc::new(CertificateEvents::new(metrics.adit().clone(), Vec::new()));
        let api = Api::open(Source::Kubeconfig(file.clone())).await.unwrap();
        let (reread, stop) = (Reread::default(), CancellationToken::new());
        let watching = watch_kubeconfig(api, Arc::clone(&events), reread, stop);
        let name = format!(
            "adit_certificate_expiry_timestamp_seconds{{file=\"{}\",kind=\"certificate\"}} ",
            file.display()
        );
        let end = || {
            let text = metrics.scrape().text();
            let ends = text.lines().filter_map(|line| line.strip_prefix(&name));
            let ends: Vec<f64> = ends.map(|end| end.parse().unwrap()).collect();
            ends.first().copied()
        };
        let told = async |expected: Option<f64>| {
            for _look in 0..100 {
                if end() == expected {
                    return;
                }
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
            assert_eq!(end(), expected);
        };
        let is_warned = || events.warnings.lock().unwrap().0.contains_key(&file);
        let changing = async {
            told(Some(4_102_444_800.0)).await;
            write_pair(2090);
            let named = json!({"client-certificate": "client.crt", "client-key": "client.key"});
            write_kubeconfig(&file, &named);
            told(Some(3_786_912_000.0)).await;
            assert!(!is_warned());
            write_pair(2020);
            told(Some(1_577_836_800.0)).await;
            assert!(is_warned());
            write_kubeconfig(&file, &json!({"token": "t"}));
            told(None).await;
        };
        tokio::select! {
            () = watching => panic!("it watches until it is stopped"),
            () = changing => (),
        }
    }
}
