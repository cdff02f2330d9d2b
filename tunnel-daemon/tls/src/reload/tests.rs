//! Tests of files that are replaced, broken, repaired and swapped by symbolic link; with `reload_now` and with the
//! watcher.

use super::*;
use crate::{
    inspect,
    selfsigned::{Issued, ThrowawayCa, Usage},
    tls::Alpn,
};
use adit_config::tls_policy::TlsPolicy;
use std::{fs, os::unix::fs::symlink};
use tokio::sync::mpsc;

/// Longer than any of these tests takes, so only the watcher can notice a change.
const NEVER: Duration = Duration::from_secs(24 * 60 * 60);

fn issue() -> Issued {
    ThrowawayCa::new("test")
        .unwrap()
        .issue(Usage::Server, "server", &["localhost".to_owned()])
        .unwrap()
}

fn write_pair(directory: &Path, pair: &Issued) {
    fs::write(directory.join("tls.crt"), &pair.cert_pem).unwrap();
    fs::write(directory.join("tls.key"), &pair.key_pem).unwrap();
}

fn load(directory: &Path) -> Arc<ReloadableServerTls> {
    let (cert, key) = (directory.join("tls.crt"), directory.join("tls.key"));
    let (policy, alpn) = (TlsPolicy::default(), Alpn::http11());
    Reloadable::load(ServerTls {
        cert,
        key,
        client_ca: None,
        client_crl: None,
        client_may_be_anonymous: false,
        policy,
        alpn,
    })
    .unwrap()
}

fn loaded() -> (tempfile::TempDir, Arc<ReloadableServerTls>) {
    let directory = tempfile::tempdir().unwrap();
    write_pair(directory.path(), &issue());
    let tls = load(directory.path());
    (directory, tls)
}

#[test]
fn unchanged_files_keep_the_configuration_and_its_sessions() {
    let (directory, tls) = loaded();
    let before = tls.current();
    let same = fs::read(directory.path().join("tls.crt")).unwrap();
    fs::write(directory.path().join("tls.crt"), same).unwrap();
    assert_eq!(tls.reload_now().unwrap(), Reloaded::Unchanged);
    assert!(Arc::ptr_eq(&before, &tls.current()));
}

#[test]
fn replaced_files_are_used() {
    let (directory, tls) = loaded();
    let before = tls.current();
    write_pair(directory.path(), &issue());
    assert_eq!(tls.reload_now().unwrap(), Reloaded::Replaced);
    assert!(!Arc::ptr_eq(&before, &tls.current()));
}

#[test]
fn broken_mismatched_and_missing_files_keep_the_old_configuration() {
    let (directory, tls) = loaded();
    let before = tls.current();
    let cert = directory.path().join("tls.crt");
    for content in ["", "garbage", &issue().cert_pem] {
        fs::write(&cert, content).unwrap();
        tls.reload_now().unwrap_err();
        assert!(Arc::ptr_eq(&before, &tls.current()));
    }
    fs::remove_file(&cert).unwrap();
    assert!(matches!(tls.reload_now(), Err(TlsError::Unreadable { .. })));
    assert!(Arc::ptr_eq(&before, &tls.current()));
}

#[test]
fn emptied_client_ca_never_replaces_a_full_one() {
    let directory = tempfile::tempdir().unwrap();
    write_pair(directory.path(), &issue());
    let ca = directory.path().join("ca.crt");
    fs::write(&ca, ThrowawayCa::new("clients").unwrap().cert_pem()).unwrap();
    let spec = ServerTls {
        client_ca: Some(ca.clone()),
        client_crl: None,
        client_may_be_anonymous: false,
        ..load(directory.path()).spec().clone()
    };
    let tls = Reloadable::load(spec).unwrap();
    let before = tls.current();
    fs::write(&ca, "").unwrap();
    assert!(matches!(tls.reload_now(), Err(TlsError::NoCertificate { path }) if path == ca));
    assert!(Arc::ptr_eq(&before, &tls.current()));
}

/// Broken files on disk do not affect the certificates in use.
#[test]
fn expiry_is_that_of_the_certificates_in_use() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let signer = ThrowawayCa::new("test").unwrap();
    let mut pair = signer
        .issue(Usage::Server, "server", &["localhost".to_owned()])
        .unwrap();
    pair.cert_pem.push_str(&signer.cert_pem());
    write_pair(directory.path(), &pair);
    fs::write(at("ca.crt"), signer.cert_pem()).unwrap();
    let tls = Reloadable::load(ServerTls {
        client_ca: Some(at("ca.crt")),
        ..load(directory.path()).spec().clone()
    })
    .unwrap();
    let before = tls.expiries();
    let read: Vec<_> = before
        .iter()
        .map(|one| (one.path.clone(), one.is_ca, one.not_after))
        .collect();
    let ends = |name: &str| {
        let all = inspect::certificates(&at(name)).unwrap();
        all.iter().map(|one| one.not_after).min().unwrap()
    };
    let expected = [
        (at("ca.crt"), true, ends("ca.crt")),
        (at("tls.crt"), false, ends("tls.crt")),
    ];
    assert_eq!(read, expected);
    fs::write(at("tls.crt"), "").unwrap();
    assert!(tls.reload_now().is_err());
    assert_eq!(tls.expiries(), before);
}

/// The watcher's reports, as text.
struct Reports(mpsc::Sender<String>);

impl ReloadEvents for Reports {
    fn loaded(&self, name: &'static str) {
        self.0.try_send(format!("{name} loaded")).unwrap();
    }

    fn restored(&self, name: &'static str) {
        self.loaded(name);
    }

    fn failed(&self, name: &'static str, _error: &TlsError) {
        self.0.try_send(format!("{name} failed")).unwrap();
    }

    fn stuck(&self, name: &'static str) {
        self.0.try_send(format!("{name} stuck")).unwrap();
    }

    fn expiries(&self, _expiries: &[Expiry]) {}
}

/// A running watcher, stopped on drop.
struct Watching {
    reports: mpsc::Receiver<String>,
    tasks: adit_net::tasks::Tasks,
}

impl Watching {
    fn start(tls: &Arc<ReloadableServerTls>, poll: Duration) -> Self {
        let (sender, reports) = mpsc::channel(64);
        let target: Arc<dyn Reload> = Arc::<ReloadableServerTls>::clone(tls);
        let tasks = adit_net::tasks::Tasks::new(1);
        tasks.spawn_always(
            "watch",
            watch(
                vec![("server", target)],
                poll,
                Arc::new(Reports(sender)),
                Reread::default(),
                tasks.stopping(),
            ),
        );
        Self { reports, tasks }
    }

    /// The next report; the deadline only turns a hang into a failure.
    async fn next(&mut self) -> String {
        let deadline = Duration::from_secs(60);
        tokio::time::timeout(deadline, self.reports.recv())
            .await
            .expect("a report in time")
            .expect("a watcher")
    }

    /// Skips failures: the watcher may see files half-way through successive writes.
    async fn until_loaded(&mut self) {
        while self.next().await != "server loaded" {}
    }
}

/// Counts its reloads.
struct Counted(mpsc::Sender<()>);

impl Reload for Counted {
    fn paths(&self) -> Vec<&Path> {
        Vec::new()
    }

    fn expiries(&self) -> Vec<Expiry> {
        Vec::new()
    }

    fn reload_now(&self) -> Result<Reloaded, TlsError> {
        self.0.try_send(()).unwrap();
        Ok(Reloaded::Unchanged)
    }
}

#[tokio::test]
async fn a_reread_request_reads_files_at_once() {
    let (sender, mut reads) = mpsc::channel(64);
    let (reports, _none) = mpsc::channel(1);
    let reread = Reread::default();
    let tasks = adit_net::tasks::Tasks::new(1);
    let watching = watch(
        vec![("server", Arc::new(Counted(sender)) as Arc<dyn Reload>)],
        NEVER,
        Arc::new(Reports(reports)),
        reread.clone(),
        tasks.stopping(),
    );
    tasks.spawn_always("watch", watching);
    let mut read = async || {
        let deadline = Duration::from_secs(60);
        tokio::time::timeout(deadline, reads.recv()).await.unwrap();
    };
    read().await;
    for _ in 0..2 {
        reread.ask();
        read().await;
    }
}

#[tokio::test]
async fn watcher_reports_broken_files_once_and_their_repair() {
    let (directory, tls) = loaded();
    let cert = directory.path().join("tls.crt");
    let good = fs::read(&cert).unwrap();
    let mut watching = Watching::start(&tls, Duration::from_millis(20));
    fs::write(&cert, "garbage").unwrap();
    assert_eq!(watching.next().await, "server failed");
    // Polls run every 20 ms meanwhile, and none of them may report the same failure again.
    fs::write(&cert, good).unwrap();
    assert_eq!(watching.next().await, "server loaded");
    let drained = watching.tasks.drain(Duration::from_secs(60)).await;
    assert_eq!(drained.cut_off, 0);
}

#[tokio::test]
async fn watcher_notices_files_replaced_by_rename() {
    let (directory, tls) = loaded();
    let before = tls.current();
    let mut watching = Watching::start(&tls, NEVER);
    let fresh = tempfile::tempdir_in(directory.path()).unwrap();
    write_pair(fresh.path(), &issue());
    for name in ["tls.crt", "tls.key"] {
        fs::rename(fresh.path().join(name), directory.path().join(name)).unwrap();
    }
    watching.until_loaded().await;
    assert!(!Arc::ptr_eq(&before, &tls.current()));
}

/// Upstream (configuration): Replaced certificates, CAs, tokens and kubeconfigs are used from the next handshake on.
#[tokio::test]
async fn watcher_notices_a_kubernetes_style_symlink_swap() {
    let mount = tempfile::tempdir().unwrap();
    let path = |name: &str| mount.path().join(name);
    fs::create_dir(path("..v1")).unwrap();
    write_pair(&path("..v1"), &issue());
    symlink("..v1", path("..data")).unwrap();
    for name in ["tls.crt", "tls.key"] {
        symlink(Path::new("..data").join(name), path(name)).unwrap();
    }
    let tls = load(mount.path());
    let before = tls.current();
    let mut watching = Watching::start(&tls, NEVER);
    for version in ["..v2", "..v3"] {
        fs::create_dir(path(version)).unwrap();
        write_pair(&path(version), &issue());
        symlink(version, path("..data_tmp")).unwrap();
        fs::rename(path("..data_tmp"), path("..data")).unwrap();
        // One swap is one consistent pair: no failure in between.
        assert_eq!(watching.next().await, "server loaded");
    }
    assert!(!Arc::ptr_eq(&before, &tls.current()));
}

#[tokio::test]
async fn polling_alone_notices_a_change_too() {
    let (directory, tls) = loaded();
    let before = tls.current();
    let mut watching = Watching::start(&tls, Duration::from_millis(20));
    // Each file becomes a link into another directory, created after the watch began and therefore not watched.
    let elsewhere = tempfile::tempdir().unwrap();
    write_pair(elsewhere.path(), &issue());
    for name in ["tls.crt", "tls.key"] {
        fs::remove_file(directory.path().join(name)).unwrap();
        symlink(elsewhere.path().join(name), directory.path().join(name)).unwrap();
    }
    watching.until_loaded().await;
    let linked = tls.current();
    assert!(!Arc::ptr_eq(&before, &linked));
    write_pair(elsewhere.path(), &issue());
    watching.until_loaded().await;
    assert!(!Arc::ptr_eq(&linked, &tls.current()));
}

/// A pipe in place of a certificate: it is refused, neither waited for nor read.
#[tokio::test]
async fn watcher_refuses_a_pipe_and_follows_the_file_that_replaces_it() {
    let (directory, tls) = loaded();
    let cert = directory.path().join("tls.crt");
    let good = fs::read(&cert).unwrap();
    let mut watching = Watching::start(&tls, Duration::from_millis(20));
    let pipe = directory.path().join("pipe");
    let (kind, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR);
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, kind, mode, 0).unwrap();
    fs::rename(&pipe, &cert).unwrap();
    assert_eq!(watching.next().await, "server failed");
    fs::remove_file(&cert).unwrap();
    fs::write(&cert, good).unwrap();
    watching.until_loaded().await;
}

/// Blocks in its second reload, as on a mount whose server does not answer, until it is let go.
struct Hung(Mutex<(usize, std::sync::mpsc::Receiver<()>)>);

impl Reload for Hung {
    fn paths(&self) -> Vec<&Path> {
        vec![Path::new("/nowhere/hung")]
    }

    fn expiries(&self) -> Vec<Expiry> {
        Vec::new()
    }

    fn reload_now(&self) -> Result<Reloaded, TlsError> {
        let mut state = self.0.lock().unwrap();
        state.0 += 1;
        if state.0 == 2 {
            let _gone = state.1.recv();
            return Ok(Reloaded::Replaced);
        }
        Ok(Reloaded::Unchanged)
    }
}

/// The reader's own test has the report after 5 s.
#[tokio::test]
async fn a_target_that_hangs_delays_no_other_and_is_followed_again() {
    let (directory, tls) = loaded();
    let (go, held) = std::sync::mpsc::channel();
    let hung: Arc<dyn Reload> = Arc::new(Hung(Mutex::new((0, held))));
    let (sender, reports) = mpsc::channel(64);
    let tasks = adit_net::tasks::Tasks::new(1);
    let target: Arc<dyn Reload> = Arc::<ReloadableServerTls>::clone(&tls);
    let watching = watch(
        vec![("hung", hung), ("server", target)],
        Duration::from_millis(20),
        Arc::new(Reports(sender)),
        Reread::default(),
        tasks.stopping(),
    );
    tasks.spawn_always("watch", watching);
    let mut watching = Watching { reports, tasks };
    for _renewal in 0..3 {
        write_pair(directory.path(), &issue());
        while watching.next().await != "server loaded" {}
    }
    drop(go);
    while watching.next().await != "hung loaded" {}
}
