//! Tests of leases at a fake API server: published, collected, watched.

mod support;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use adit_kube::access::{Api, Source};
use adit_kube::leases::publish::Publisher;
use adit_kube::leases::watch::Leased;
use adit_kube::leases::{LeaseEvents, LeaseScope, collect, parse_labels, watch as leases};
use serde_json::{Value, json};
use support::{FakeApi, Fault};
use tempfile::TempDir;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// Failed requests as counted: kind, status, reason.
#[derive(Default)]
struct Counted(Mutex<Vec<(&'static str, u16, String)>>);

impl Counted {
    fn count(&self, kind: &'static str, status: u16, reason: &str) {
        self.0
            .lock()
            .expect("a list")
            .push((kind, status, reason.to_owned()));
    }

    fn has(&self, kind: &str, status: u16) -> bool {
        self.0
            .lock()
            .expect("a list")
            .iter()
            .any(|(known, code, _)| (*known, *code) == (kind, status))
    }
}

impl LeaseEvents for Counted {
    fn listed(&self, status: u16, reason: &str, _time: Duration) {
        self.count("list", status, reason);
    }

    fn watched(&self, status: u16, reason: &str) {
        self.count("watch", status, reason);
    }

    fn deleted(&self, status: u16, reason: &str, _time: Duration) {
        self.count("delete", status, reason);
    }
}

struct World {
    fake: FakeApi,
    api: Arc<Api>,
    counted: Arc<Counted>,
    running: JoinSet<()>,
    _folder: TempDir,
}

fn scope() -> LeaseScope {
    LeaseScope {
        namespace: "kube-system".to_owned(),
        selector: "k8s-app=konnectivity-server".to_owned(),
    }
}

impl World {
    async fn new() -> Self {
        let fake = FakeApi::start().await;
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("kubeconfig");
        fake.write_kubeconfig(&file);
        Self {
            api: Api::open(Source::Kubeconfig(file))
                .await
                .expect("a kubeconfig"),
            fake,
            counted: Arc::default(),
            running: JoinSet::new(),
            _folder: folder,
        }
    }

    fn publish(&mut self, server: &str) -> CancellationToken {
        let labels = parse_labels("k8s-app=konnectivity-server").expect("labels");
        let publisher = Publisher::new(Arc::clone(&self.api), scope(), labels, server);
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        self.running
            .spawn(async move { publisher.run(stopped).await });
        stop
    }

    fn watch(&mut self) -> watch::Receiver<Leased> {
        let (sender, receiver) = watch::channel(None);
        let events = Arc::clone(&self.counted) as Arc<dyn LeaseEvents>;
        self.running
            .spawn(leases::run(Arc::clone(&self.api), scope(), events, sender));
        receiver
    }

    fn collect(&mut self) -> watch::Receiver<usize> {
        let (sender, receiver) = watch::channel(0);
        let events = Arc::clone(&self.counted) as Arc<dyn LeaseEvents>;
        self.running.spawn(collect::run(
            Arc::clone(&self.api),
            scope(),
            "own".to_owned(),
            events,
            sender,
        ));
        receiver
    }

    /// Writes the lease of a server, renewed `renewed_ago` seconds ago.
    fn put(&self, server: &str, renewed_ago: i64) {
        self.put_for(server, renewed_ago, json!(30));
    }

    fn put_for(&self, server: &str, renewed_ago: i64, seconds: Value) {
        let mut state = self.fake.state.lock().expect("the state");
        state
            .leases
            .put(&name(server), lease(server, renewed_ago, seconds));
    }

    fn lease(&self, server: &str) -> Option<Value> {
        self.fake
            .state
            .lock()
            .expect("the state")
            .leases
            .all
            .get(&name(server))
            .cloned()
    }

    fn requests(&self, method: &str) -> usize {
        let state = self.fake.state.lock().expect("the state");
        state.leases.requests.get(method).copied().unwrap_or(0)
    }
}

fn name(server: &str) -> String {
    format!("konnectivity-proxy-server-{server}")
}

fn lease(server: &str, renewed_ago: i64, seconds: Value) -> Value {
    let renewed = k8s_openapi::jiff::Timestamp::from_second(
        i64::try_from(support::in_seconds(0)).expect("a time") - renewed_ago,
    );
    let renewed = renewed.expect("a time").to_string();
    json!({
        "metadata": {"labels": {"k8s-app": "konnectivity-server"}},
        "spec": {"holderIdentity": server, "leaseDurationSeconds": seconds, "renewTime": renewed},
    })
}

async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let waiting = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), waiting)
        .await
        .unwrap_or_else(|_| panic!("no {what}"));
}

async fn servers(leased: &mut watch::Receiver<Leased>, expected: &[&str]) {
    let expected = Some(expected.iter().map(|id| (*id).to_owned()).collect());
    let arrives = leased.wait_for(|now| *now == expected);
    let arrived = tokio::time::timeout(Duration::from_secs(20), arrives).await;
    assert!(arrived.is_ok(), "not {expected:?}");
}

#[tokio::test]
async fn a_lease_is_published_renewed_and_withdrawn() {
    let mut world = World::new().await;
    let stop = world.publish("s1");
    until("lease", || world.lease("s1").is_some()).await;
    let first = world.lease("s1").unwrap();
    assert_eq!(first["spec"]["holderIdentity"], "s1");
    assert_eq!(first["spec"]["leaseDurationSeconds"], 30);
    assert_eq!(
        first["metadata"]["labels"],
        json!({"k8s-app": "konnectivity-server"})
    );
    // A MicroTime has six decimal digits.
    let renewed = first["spec"]["renewTime"].as_str().unwrap();
    assert_eq!(
        renewed.split('.').nth(1).map(str::len),
        Some(7),
        "{renewed}"
    );
    tokio::time::pause();
    tokio::time::advance(Duration::from_millis(15_700)).await;
    tokio::time::resume();
    until("renewal", || world.requests("PUT") == 1).await;
    let second = world.lease("s1").unwrap();
    assert_eq!(second["spec"]["acquireTime"], first["spec"]["acquireTime"]);
    assert_ne!(second["spec"]["renewTime"], first["spec"]["renewTime"]);
    stop.cancel();
    world.running.join_next().await.unwrap().unwrap();
    assert_eq!(world.lease("s1"), None);
}

/// As after a crash: the same server finds its old lease. Later another client writes to the lease.
#[tokio::test]
async fn an_existing_lease_is_taken_over_and_a_conflict_is_retried() {
    let mut world = World::new().await;
    world.put("s1", 100);
    let _stop = world.publish("s1");
    until("takeover", || world.requests("PUT") == 1).await;
    assert_eq!(world.requests("POST"), 0);
    world.put("s1", 0);
    tokio::time::pause();
    tokio::time::advance(Duration::from_millis(15_700)).await;
    tokio::time::resume();
    // One PUT fails because of its old version, and one succeeds with the new version.
    until("renewal", || world.requests("PUT") == 3).await;
    let _deleted = world.fake.state.lock().unwrap().leases.remove(&name("s1"));
    tokio::time::pause();
    tokio::time::advance(Duration::from_millis(15_700)).await;
    tokio::time::resume();
    until("new lease", || world.requests("POST") == 1).await;
}

#[tokio::test]
async fn an_unavailable_api_server_is_retried_and_delays_no_shutdown() {
    let mut world = World::new().await;
    world
        .fake
        .set_fault(Some(Fault::Answer(503, "starting".into())));
    let stop = world.publish("s1");
    until("attempts", || world.fake.requests() >= 2).await;
    world.fake.set_fault(None);
    until("lease", || world.lease("s1").is_some()).await;
    world.fake.set_fault(Some(Fault::Silence));
    let began = std::time::Instant::now();
    stop.cancel();
    world.running.join_next().await.unwrap().unwrap();
    let took = began.elapsed();
    assert!(took < Duration::from_secs(4), "{took:?}");
}

/// Upstream (configuration): Expired leases are deleted; valid and foreign ones stay.
#[tokio::test]
async fn expired_leases_are_deleted_and_the_others_counted() {
    let mut world = World::new().await;
    for (server, renewed_ago) in [("a", 0), ("b", 20), ("old", 31), ("older", 1000)] {
        world.put(server, renewed_ago);
    }
    world.put_for("odd", 0, Value::Null);
    let mut counts = world.collect();
    counts.wait_for(|count| *count == 3).await.unwrap();
    until("deletions", || world.requests("DELETE") == 3).await;
    assert!(world.lease("a").is_some() && world.lease("b").is_some());
    assert!(
        ["old", "older", "odd"]
            .iter()
            .all(|server| world.lease(server).is_none())
    );
    until("counts", || world.counted.0.lock().unwrap().len() == 4).await;
    assert!(world.counted.has("list", 200) && world.counted.has("delete", 200));
}

#[tokio::test]
async fn leases_are_watched_with_and_without_streaming_lists() {
    for is_old in [false, true] {
        let mut world = World::new().await;
        world.fake.state.lock().unwrap().leases.is_old = is_old;
        world.put("a", 0);
        world.put("gone", 100);
        let mut leased = world.watch();
        servers(&mut leased, &["a"]).await;
        until("watch", || world.counted.has("watch", 200)).await;
        assert_eq!(world.counted.has("watch", 422), is_old);
        world.put("b", 0);
        servers(&mut leased, &["a", "b"]).await;
        let _deleted = world.fake.state.lock().unwrap().leases.remove(&name("a"));
        servers(&mut leased, &["b"]).await;
        // Expiry causes no watch event.
        world.put_for("b", 0, json!(2));
        servers(&mut leased, &[]).await;
        // A change between two watches is not missed.
        {
            let leases = &mut world.fake.state.lock().unwrap().leases;
            leases.end_watches();
            leases.put(&name("c"), lease("c", 0, json!(30)));
        }
        servers(&mut leased, &["c"]).await;
        // Agents may only list and watch.
        assert_eq!(
            world.requests("GET"),
            world.fake.requests(),
            "no request of another kind"
        );
    }
}

/// Leases expire only while the watch is in sync.
///
/// Upstream (configuration): While the API server is away, the last server count stays.
#[tokio::test]
async fn lease_state_is_kept_while_the_api_server_is_down() {
    let mut world = World::new().await;
    world.put_for("a", 0, json!(2));
    let mut leased = world.watch();
    servers(&mut leased, &["a"]).await;
    world.fake.set_fault(Some(Fault::Answer(500, "no".into())));
    world.fake.state.lock().unwrap().leases.end_watches();
    until("failed watch", || world.counted.has("watch", 500)).await;
    let passed = std::time::Instant::now() + Duration::from_millis(2100);
    until("end of the lease", || std::time::Instant::now() > passed).await;
    assert!(
        leased
            .borrow()
            .as_ref()
            .is_some_and(|ids| ids.contains("a"))
    );
    world.fake.set_fault(None);
    servers(&mut leased, &[]).await;
}

#[tokio::test]
async fn leases_are_unknown_before_the_first_list() {
    let mut world = World::new().await;
    world.fake.set_fault(Some(Fault::Answer(
        403,
        r#"{"reason":"Forbidden","message":"no"}"#.into(),
    )));
    let leased = world.watch();
    until("attempts", || world.counted.has("list", 403)).await;
    assert_eq!(*leased.borrow(), None);
}
