//! Tests of leases at a fake API server: published, collected, watched.

mod support;

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use adit_kube::access::{Api, Source};
use adit_kube::leases::publish::Publisher;
use adit_kube::leases::watch::Leased;
use adit_kube::leases::{LeaseEvents, LeaseScope, collect, parse_labels, watch as leases};
use serde_json::{Value, json};
use support::{FakeApi, Fault, State};
use tempfile::TempDir;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// Failed requests as counted: kind, status, reason.
#[derive(Default)]
struct Counted(Mutex<Vec<(&'static str, u16, String)>>);

impl Counted {
    fn count(&self, kind: &'static str, status: u16, reason: &str) {
        let mut all = self.0.lock().expect("a list");
        all.push((kind, status, reason.to_owned()));
    }

    fn number(&self, is_it: impl Fn(&(&'static str, u16, String)) -> bool) -> usize {
        let all = self.0.lock().expect("a list");
        all.iter().filter(|one| is_it(one)).count()
    }

    fn has(&self, kind: &str, status: u16) -> bool {
        self.number(|(known, code, _)| (*known, *code) == (kind, status)) > 0
    }
}

impl LeaseEvents for Counted {
    fn listed(&self, status: u16, reason: &str, _time: Duration) {
        self.count("list", status, reason);
    }

    fn watched(&self, status: u16, reason: &str) {
        self.count("watch", status, reason);
    }

    fn skipped(&self) {
        self.count("skip", 0, "");
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

    fn state(&self) -> MutexGuard<'_, State> {
        self.fake.state.lock().expect("the state")
    }

    /// Writes the lease of a server, renewed `renewed_ago` seconds ago.
    fn put(&self, server: &str, renewed_ago: i64) {
        self.put_for(server, renewed_ago, json!(30));
    }

    fn put_for(&self, server: &str, renewed_ago: i64, seconds: Value) {
        self.put_object(server, lease(server, renewed_ago, seconds));
    }

    /// Writes an object under the name of a server's lease.
    fn put_object(&self, server: &str, object: Value) {
        self.state().leases.put(&name(server), object);
    }

    /// Lets lists follow one another, `rounds` times 15 s, each answered before the next.
    async fn lists(&self, rounds: usize) {
        let count = || self.counted.number(|(kind, ..)| *kind == "list");
        for _round in 0..rounds {
            let before = count();
            skip(Duration::from_secs(15)).await;
            until("list", || count() > before).await;
        }
    }

    fn lease(&self, server: &str) -> Option<Value> {
        self.state().leases.all.get(&name(server)).cloned()
    }

    fn requests(&self, method: &str) -> usize {
        let requests = &self.state().leases.requests;
        requests.get(method).copied().unwrap_or(0)
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

/// Advances the clock by `time`.
async fn skip(time: Duration) {
    tokio::time::pause();
    tokio::time::advance(time).await;
    tokio::time::resume();
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
    let labels = json!({"k8s-app": "konnectivity-server"});
    assert_eq!(first["metadata"]["labels"], labels);
    // A MicroTime has six decimal digits.
    let renewed = first["spec"]["renewTime"].as_str().unwrap();
    let fraction = renewed.split('.').nth(1);
    assert_eq!(fraction.map(str::len), Some(7), "{renewed}");
    skip(Duration::from_millis(15_700)).await;
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
    skip(Duration::from_millis(15_700)).await;
    // One PUT fails because of its old version, and one succeeds with the new version.
    until("renewal", || world.requests("PUT") == 3).await;
    let _deleted = world.state().leases.remove(&name("s1"));
    skip(Duration::from_millis(15_700)).await;
    until("new lease", || world.requests("POST") == 1).await;
}

#[tokio::test]
async fn an_unavailable_api_server_is_retried_and_delays_no_shutdown() {
    let mut world = World::new().await;
    let starting = Fault::Answer(503, "starting".into());
    world.fake.set_fault(Some(starting));
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

/// A lease as a stranger may write it: its time is beyond what clocks can say.
fn unreadable(server: &str) -> Value {
    let mut lease = lease(server, 0, json!(30));
    lease["spec"]["renewTime"] = json!("9999-12-31T23:59:59.000000Z");
    lease
}

/// Upstream (configuration): Expired leases are deleted; valid and foreign ones stay.
#[tokio::test]
async fn expired_leases_are_deleted_and_the_others_counted() {
    let mut world = World::new().await;
    for (server, renewed_ago) in [("a", 0), ("b", 20), ("old", 31), ("older", 1000)] {
        let seconds = if renewed_ago > 30 { 30 } else { 3600 };
        world.put_for(server, renewed_ago, json!(seconds));
    }
    world.put_for("odd", 0, Value::Null);
    // As of a server whose clock is an hour behind: it renews its lease.
    world.put("slow", 3600);
    let mut counts = world.collect();
    let counted = tokio::time::timeout(Duration::from_secs(20), counts.wait_for(|now| *now == 3));
    assert!(counted.await.is_ok(), "no count");
    world.lists(1).await;
    assert_eq!(world.requests("DELETE"), 0, "none was unchanged for 30 s");
    world.put("slow", 3590);
    world.lists(1).await;
    until("deletions", || world.counted.has("delete", 200)).await;
    until("deletions", || world.requests("DELETE") == 3).await;
    let exist = |servers: [&str; 3]| servers.map(|server| world.lease(server).is_some());
    assert_eq!(exist(["a", "b", "slow"]), [true; 3]);
    let are_gone = || exist(["old", "older", "odd"]) == [false; 3];
    until("deletions", are_gone).await;
}

/// Limit (sizes): Leases of a list | pages of 500, of at most 1 MiB; 20,000 in all. An unreadable lease is skipped and counted
#[tokio::test]
async fn a_list_is_read_page_by_page_and_lease_by_lease() {
    let mut world = World::new().await;
    for number in 0..1500 {
        let mut lease = lease(&format!("s{number:04}"), 0, json!(3600));
        lease["metadata"]["annotations"] = json!({"a": "x".repeat(1000)});
        world.put_object(&format!("s{number:04}"), lease);
    }
    world.put_object("s0700x", unreadable("s0700x"));
    // Longer than a page may be.
    let mut long = lease("s0800x", 0, json!(3600));
    long["metadata"]["annotations"] = json!({"a": "x".repeat(1 << 20)});
    world.put_object("s0800x", long);
    world.state().leases.gone = 1;
    let mut counts = world.collect();
    let counted = counts.wait_for(|now| *now == 1502);
    let counted = tokio::time::timeout(Duration::from_secs(60), counted).await;
    let all = "the valid leases, the long one and this server";
    assert!(counted.is_ok(), "{all}");
    let skips = world.counted.number(|(kind, ..)| *kind == "skip");
    assert!(world.counted.has("list", 200) && skips == 1);
    assert_eq!(world.state().leases.gone, 0);
    world.state().leases.is_old = true;
    let mut leased = world.watch();
    let known = leased.wait_for(|now| now.as_ref().is_some_and(|ids| ids.len() == 1024));
    let known = tokio::time::timeout(Duration::from_secs(60), known).await;
    assert!(known.is_ok(), "as many as an agent keeps");
}

/// A page is gone for good: the list fails, and is not read for ever.
#[tokio::test]
async fn a_list_begins_again_at_most_twice() {
    let mut world = World::new().await;
    for number in 0..501 {
        world.put(&number.to_string(), 0);
    }
    world.state().leases.gone = usize::MAX;
    let _counts = world.collect();
    until("failure", || world.counted.has("list", 410)).await;
    assert_eq!(world.state().leases.pages, 6);
}

#[tokio::test]
async fn unreadable_leases_and_events_are_skipped_by_a_watch() {
    for is_old in [false, true] {
        let mut world = World::new().await;
        world.state().leases.is_old = is_old;
        world.put("a", 0);
        world.put_object("b", unreadable("b"));
        let mut leased = world.watch();
        servers(&mut leased, &["a"]).await;
        until("watch", || world.counted.has("watch", 200)).await;
        {
            let mut state = world.state();
            let leases = &mut state.leases;
            leases.put(&name("b"), unreadable("b"));
            leases.say(&json!({"type": "ADDED", "object": {"spec": [1]}}));
            leases.say(&json!("no event"));
            leases.say(&json!({"type": "ADDED", "object": "x".repeat(2 << 20)}));
            leases.put(&name("c"), lease("c", 0, json!(30)));
        }
        servers(&mut leased, &["a", "c"]).await;
        let watches = world
            .counted
            .number(|(kind, code, _)| (*kind, *code) == ("watch", 200));
        assert_eq!(watches, 1, "the watch goes on");
    }
}

/// Whoever may write leases must not keep a server from its own.
#[tokio::test]
async fn an_unreadable_lease_of_this_server_is_overwritten() {
    let mut world = World::new().await;
    world.put_object("s1", unreadable("s1"));
    let _stop = world.publish("s1");
    until("takeover", || world.requests("PUT") == 1).await;
    let lease = world.lease("s1").unwrap();
    let renewed = lease["spec"]["renewTime"].as_str().unwrap();
    assert!(!renewed.starts_with("9999"), "{renewed}");
}

#[tokio::test]
async fn leases_are_watched_with_and_without_streaming_lists() {
    for is_old in [false, true] {
        let mut world = World::new().await;
        world.state().leases.is_old = is_old;
        world.put("a", 0);
        world.put("gone", 100);
        let mut leased = world.watch();
        servers(&mut leased, &["a"]).await;
        until("watch", || world.counted.has("watch", 200)).await;
        assert_eq!(world.counted.has("watch", 422), is_old);
        world.put("b", 0);
        servers(&mut leased, &["a", "b"]).await;
        let _deleted = world.state().leases.remove(&name("a"));
        servers(&mut leased, &["b"]).await;
        // Expiry causes no watch event.
        world.put_for("b", 0, json!(2));
        servers(&mut leased, &[]).await;
        // A change between two watches is not missed.
        {
            let leases = &mut world.state().leases;
            leases.end_watches();
            leases.put(&name("c"), lease("c", 0, json!(30)));
        }
        servers(&mut leased, &["c"]).await;
        // Agents may only list and watch.
        let (reads, all) = (world.requests("GET"), world.fake.requests());
        assert_eq!(reads, all, "no request of another kind");
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
    world.state().leases.end_watches();
    until("failed watch", || world.counted.has("watch", 500)).await;
    let passed = std::time::Instant::now() + Duration::from_millis(2100);
    until("end of the lease", || std::time::Instant::now() > passed).await;
    let has_a = leased
        .borrow()
        .as_ref()
        .is_some_and(|ids| ids.contains("a"));
    assert!(has_a);
    world.fake.set_fault(None);
    servers(&mut leased, &[]).await;
}

#[tokio::test]
async fn leases_are_unknown_before_the_first_list() {
    let mut world = World::new().await;
    let forbidden = r#"{"reason":"Forbidden","message":"no"}"#;
    world
        .fake
        .set_fault(Some(Fault::Answer(403, forbidden.into())));
    let leased = world.watch();
    until("attempts", || world.counted.has("list", 403)).await;
    assert_eq!(*leased.borrow(), None);
}
