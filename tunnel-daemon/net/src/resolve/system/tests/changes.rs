//! Tests of changing files and of invalid content.

use super::*;

#[tokio::test]
async fn changed_files_are_read_again() {
    let server =
        NameServer::start(BTreeMap::from([("web.b.test.", Reply::Data(vec![v4(1)]))])).await;
    let dir = TempDir::new().unwrap();
    let resolver = resolver(
        dir.path(),
        &server,
        "nameserver 127.0.0.1\nsearch a.test\n",
        "",
    );
    let due = || *resolver.config.next_check.lock().unwrap() = Instant::now();
    assert_eq!(resolver.lookup_ip("web").await, Err(ResolveError::NotFound));

    fs::write(
        dir.path().join("resolv.conf"),
        "nameserver 127.0.0.1\nsearch b.test\n# longer\n",
    )
    .unwrap();
    assert_eq!(
        resolver.lookup_ip("web").await,
        Err(ResolveError::NotFound),
        "not looked at yet"
    );
    due();
    assert_eq!(resolver.lookup_ip("web").await, Ok(ips("10.0.0.1")));

    fs::write(dir.path().join("hosts"), "10.5.5.5 web\n").unwrap();
    due();
    assert_eq!(resolver.lookup_ip("web").await, Ok(ips("10.5.5.5")));
}

#[tokio::test]
async fn a_file_that_is_replaced_before_its_content_is_in_use_is_read_again() {
    let dir = TempDir::new().unwrap();
    let server = NameServer::start(BTreeMap::new()).await;
    let conf = dir.path().join("resolv.conf");
    let resolver = resolver(dir.path(), &server, CONF, "");
    let search = |search: &str| format!("nameserver 127.0.0.1\nsearch {search}\n");
    fs::write(&conf, search("a.test")).unwrap();
    let reading = Reading::of(&resolver.config.files);
    fs::write(&conf, search("other.test")).unwrap();
    resolver.config.apply(reading);
    assert_eq!(resolver.config.active.load().search.concat(), "a.test");
    *resolver.config.next_check.lock().unwrap() = Instant::now();
    let search = resolver.config.current().await.search.concat();
    assert_eq!(search, "other.test");
}

#[tokio::test]
async fn an_unusable_file_keeps_its_old_content_and_hides_no_change_of_the_other() {
    let server =
        NameServer::start(BTreeMap::from([("web.b.test.", Reply::Data(vec![v4(1)]))])).await;
    let dir = TempDir::new().unwrap();
    let (conf, hosts) = (dir.path().join("resolv.conf"), dir.path().join("hosts"));
    let resolver = resolver(dir.path(), &server, CONF, "10.5.5.5 pinned\n");
    fs::remove_file(&hosts).unwrap();
    fs::create_dir(&hosts).unwrap();
    fs::write(&conf, "nameserver 127.0.0.1\nsearch b.test\n").unwrap();
    resolver.config.check().await;
    assert_eq!(resolver.lookup_ip("pinned").await, Ok(ips("10.5.5.5")));
    assert_eq!(resolver.lookup_ip("web").await, Ok(ips("10.0.0.1")));

    fs::remove_dir(&hosts).unwrap();
    fs::write(&hosts, "10.6.6.6 pinned\n").unwrap();
    fs::write(&conf, "search c.test\n").unwrap();
    resolver.config.check().await;
    let resolved = resolver.lookup_ip("pinned").await;
    assert_eq!(
        resolved,
        Ok(ips("10.6.6.6")),
        "beside a resolv.conf of no use"
    );
    assert_eq!(resolver.lookup_ip("web").await, Ok(ips("10.0.0.1")));
}

#[tokio::test]
async fn a_reread_request_takes_effect_before_the_next_lookup() {
    let (dir, server) = (
        TempDir::new().unwrap(),
        NameServer::start(BTreeMap::new()).await,
    );
    let files = files(dir.path(), &server);
    fs::write(&files.resolv_conf, CONF).unwrap();
    let reread = Reread::default();
    let resolver = SystemResolver::from_files(files, reread.clone()).unwrap();
    *resolver.config.next_check.lock().unwrap() = Instant::now() + Duration::from_secs(3600);
    fs::write(dir.path().join("hosts"), "10.5.5.5 pinned\n").unwrap();
    let gone = resolver.lookup_ip("pinned").await;
    assert_eq!(gone, Err(ResolveError::NotFound));
    reread.ask();
    assert_eq!(resolver.lookup_ip("pinned").await, Ok(ips("10.5.5.5")));
}

#[tokio::test]
async fn files_without_effective_change_keep_cached_answers() {
    let server = NameServer::start(BTreeMap::from([("web.", Reply::Data(vec![v4(1)]))])).await;
    let dir = TempDir::new().unwrap();
    let resolver = resolver(dir.path(), &server, CONF, "");
    assert_eq!(resolver.lookup_ip("web.").await, Ok(ips("10.0.0.1")));
    let _ = server.asked();
    let mut same = CONF.to_owned();
    same.push_str("# another comment\n");
    fs::write(dir.path().join("resolv.conf"), same).unwrap();
    resolver.config.check().await;
    assert_eq!(resolver.lookup_ip("web.").await, Ok(ips("10.0.0.1")));
    assert_eq!(server.asked(), HashSet::new());
}

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl io::Write for Lines {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(buf);
        Ok(buf.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Lines with `message` that this thread logs while the guard is held.
fn logged(message: &'static str) -> (tracing::subscriber::DefaultGuard, impl Fn() -> Vec<String>) {
    let lines = Lines::default();
    let said = lines.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(move || lines.clone());
    let held = tracing::subscriber::set_default(subscriber.finish());
    let with_message = move || {
        let text = String::from_utf8_lossy(&said.0.lock().unwrap()).into_owned();
        let lines = text.lines().filter(|line| line.contains(message));
        lines.map(str::to_owned).collect()
    };
    (held, with_message)
}

/// No other test may emit this warning: on a thread without a subscriber, tracing would disable it for this test as well.
#[tokio::test]
async fn invalid_items_of_both_files_are_ignored_and_logged_once() {
    let (_held, lines) = logged("item of a resolver file is ignored");
    let zone = BTreeMap::from([("web.svc.test.", Reply::Data(vec![v4(1)]))]);
    let server = NameServer::start(zone).await;
    let dir = TempDir::new().unwrap();
    let conf = "search corp..example svc.test\noptions ndots:x\nnameserver 127.0.0.1\n";
    let resolver = resolver(dir.path(), &server, conf, "");
    let hosts = b"10.7.7.7 b\xfcro\n10.7.7.8 pinned\n";
    fs::write(dir.path().join("hosts"), hosts).unwrap();
    resolver.config.check().await;
    assert_eq!(resolver.lookup_ip("web").await, Ok(ips("10.0.0.1")));
    assert_eq!(resolver.lookup_ip("pinned").await, Ok(ips("10.7.7.8")));

    let told: Vec<String> = lines();
    let names = ["resolv.conf", "resolv.conf", "hosts"];
    let places = [
        "line=1 item=\"corp..example\" why=not a domain name",
        "line=2 item=\"ndots:x\" why=the value of the option is not a number",
        "line=1 item=\"b\\\\xfcro\" why=the name is not UTF-8",
    ];
    assert_eq!(told.len(), places.len(), "{told:#?}");
    for ((line, name), place) in told.iter().zip(names).zip(places) {
        let file = dir.path().join(name);
        let file = format!("file={} ", file.display());
        assert!(line.contains("WARN") && line.contains(&file), "{line}");
        assert!(line.ends_with(place), "{line}");
    }
    fs::write(dir.path().join("resolv.conf"), conf.replace("svc", "s")).unwrap();
    resolver.config.check().await;
    assert_eq!(lines().len(), places.len(), "told before");
}

/// No other test may emit this warning: on a thread without a subscriber, tracing would disable it for this test as well.
#[tokio::test]
async fn an_unusable_configuration_is_ignored_and_logged_once_per_reason() {
    let (_held, lines) = logged("is unusable");
    let times = || lines().len();
    let server =
        NameServer::start(BTreeMap::from([("web.b.test.", Reply::Data(vec![v4(1)]))])).await;
    let dir = TempDir::new().unwrap();
    let conf = dir.path().join("resolv.conf");
    let resolver = resolver(dir.path(), &server, CONF, "");
    let check = || {
        *resolver.config.next_check.lock().unwrap() = Instant::now();
        resolver.config.current()
    };

    fs::write(&conf, "no name server here\n").unwrap();
    check().await;
    check().await;
    assert_eq!(times(), 1);
    assert_eq!(resolver.lookup_ip("web.b.test.").await, Ok(ips("10.0.0.1")));
    fs::remove_file(&conf).unwrap();
    check().await;
    check().await;
    assert_eq!(times(), 2, "another reason");
    fs::write(&conf, CONF).unwrap();
    check().await;
    fs::remove_file(&conf).unwrap();
    check().await;
    assert_eq!(times(), 3, "the same as before it was mended");
}

/// As on a mount whose server does not answer.
#[tokio::test]
async fn files_that_hang_delay_no_lookup_and_are_read_once_they_answer() {
    let dir = tempfile::tempdir().unwrap();
    let server = NameServer::start(BTreeMap::new()).await;
    let resolver = resolver(dir.path(), &server, CONF, "10.0.0.1 one\n");
    let (go, held) = std::sync::mpsc::channel::<()>();
    let hung = move || {
        let _gone = held.recv();
        None
    };
    let mut reader = resolver.config.reader.lock().await;
    assert!(reader.read(Duration::ZERO, hung).await.is_err());
    drop(reader);
    fs::write(files(dir.path(), &server).hosts, "10.0.0.22 one\n").unwrap();
    let look_up = async || {
        *resolver.config.next_check.lock().unwrap() = Instant::now();
        resolver.lookup_ip("one").await.unwrap()
    };
    for _lookup in 0..3 {
        assert_eq!(look_up().await, ips("10.0.0.1"));
    }
    drop(go);
    let changed = async { while look_up().await != ips("10.0.0.22") {} };
    timeout(Duration::from_secs(60), changed).await.unwrap();
}
