//! Programs with proxy settings of their own, through the SOCKS5 and HTTP proxy frontends. Their targets have names that only the
//! agent resolves. curl is in its own file, Go's clients are in the interop tier.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use adit::agent::RunningAgent;
use adit_net::tasks::Tasks;
use adit_testkit::certificates::Usage;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufStream};
use tokio::net::TcpSocket;

use crate::support::clients::Io;
use crate::support::skip::{finds_program, has_program, skip};
use crate::support::world::World;
use crate::support::{targets, tls};

/// Names below localhost are the agent's own host (RFC 6761).
const NAME: &str = "web.localhost";
/// Size of the file that clients get: several reads, and more than one flow-control window.
const FILE_BYTES: usize = 3_000_000;
/// Time limit of each program.
const SECONDS: &str = "120";

/// Runs a program with a time limit. It gets nothing of this environment that leads to proxies, CAs or settings of git.
#[track_caller]
fn run(program: &str, args: &[&str]) -> Output {
    let kept = ["PATH", "HOME", "TMPDIR"];
    let kept = kept
        .into_iter()
        .filter_map(|name| Some((name, std::env::var_os(name)?)));
    let mut command = Command::new("timeout");
    command
        .args([SECONDS, program])
        .args(args)
        .env_clear()
        .envs(kept)
        .env("LC_ALL", "C")
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .stdin(Stdio::null());
    command.output().expect("timeout(1) is there")
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// As [`run`], for a program that must succeed; returns what it printed.
#[track_caller]
fn good(program: &str, args: &[&str]) -> Vec<u8> {
    let output = run(program, args);
    let errors = errors(&output);
    assert_eq!(
        output.status.code(),
        Some(0),
        "{program} {args:?}: {errors}"
    );
    output.stdout
}

/// A server with both frontends, an agent, and a folder that a web server without TLS and one with TLS offer.
struct Site {
    world: World,
    _agent: RunningAgent,
    folder: PathBuf,
    plain: u16,
    secure: u16,
    _targets: [Tasks; 2],
    /// A port that refuses connections.
    closed: u16,
    _closed: TcpSocket,
}

impl Site {
    /// In the folder is `file`.
    async fn start() -> Self {
        let (world, agent) = linked().await;
        let folder = world.dir.path().join("www");
        fs::create_dir(&folder).expect("a folder");
        fs::write(folder.join("file"), file()).expect("a file");
        let root = folder.clone();
        let (plain, without_tls) = targets::serve(move |stream| {
            let root = root.clone();
            serve_http(stream, move |path| read(&root, path))
        })
        .await;
        let (root, acceptor) = (folder.clone(), tls::acceptor(&world, "web"));
        let (secure, with_tls) = targets::serve(move |stream| {
            let (root, acceptor) = (root.clone(), acceptor.clone());
            async move {
                let stream = acceptor.accept(stream).await?;
                serve_http(stream, move |path| read(&root, path)).await
            }
        })
        .await;
        let (held, closed) = targets::closed_port();
        Self {
            world,
            _agent: agent,
            folder,
            plain,
            secure,
            _targets: [without_tls, with_tls],
            closed: closed.port(),
            _closed: held,
        }
    }

    fn ca(&self) -> String {
        self.world.files.ca_file().display().to_string()
    }

    /// URLs of the file: without TLS, and with TLS.
    fn urls(&self) -> [String; 2] {
        [
            format!("http://{NAME}:{}/file", self.plain),
            format!("https://{NAME}:{}/file", self.secure),
        ]
    }

    /// A URL of the port that refuses connections.
    fn closed_url(&self, scheme: &str) -> String {
        format!("{scheme}://{NAME}:{}/", self.closed)
    }
}

/// A world with both frontends, a linked agent, and a certificate `web` for targets.
async fn linked() -> (World, RunningAgent) {
    let flags = [
        "--frontend=http-proxy=tcp:127.0.0.1:0",
        "--frontend=socks5=tcp:127.0.0.1:0",
        "--insecure-plaintext-frontend",
    ];
    let names = [NAME.to_owned()];
    let world = World::start_with(
        |files| {
            let issued = files.issue("web", Usage::Server, &names);
            issued.expect("a certificate");
        },
        &flags,
    )
    .await;
    let agent = world.agent("agent-1", &[]).await;
    world.links(1).await;
    (world, agent)
}

/// The HTTP proxy, and the SOCKS5 proxy by this scheme.
fn proxies(world: &World, socks: &str) -> [String; 2] {
    let frontends = &world.server().frontends;
    [
        format!("http://{}", frontends[0]),
        format!("{socks}://{}", frontends[1]),
    ]
}

fn file() -> Vec<u8> {
    targets::pattern(0, FILE_BYTES)
}

/// A file of the folder, without the query of its path.
fn read(folder: &Path, path: &str) -> Option<Vec<u8>> {
    let path = path.split('?').next()?.strip_prefix('/')?;
    fs::read(folder.join(path)).ok()
}

/// Answers requests without bodies until the client closes. `find` finds the body for a path.
async fn serve_http(
    stream: impl Io,
    find: impl Fn(&str) -> Option<Vec<u8>> + Send,
) -> std::io::Result<()> {
    let mut stream = BufStream::new(stream);
    loop {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if stream.read_line(&mut head).await? == 0 {
                return stream.shutdown().await;
            }
        }
        let path = head.split_whitespace().nth(1).unwrap_or_default();
        let (status, body) = match find(path) {
            Some(body) => ("200 OK", body),
            None => ("404 Not Found", Vec::new()),
        };
        let head = format!(
            "HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).await?;
        stream.write_all(&body).await?;
        stream.flush().await?;
    }
}

/// The standard library's client: a whole URL, and CONNECT for TLS. A refused dial has the proxy's status and text.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn urllib_gets_files_through_its_proxy_handler() {
    const SCRIPT: &str = r#"
import ssl, sys, urllib.error, urllib.request
proxy, ca, closed, *urls = sys.argv[1:]
opener = urllib.request.build_opener(
    urllib.request.ProxyHandler({"http": proxy, "https": proxy}),
    urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=ca)))
for url in urls:
    sys.stdout.buffer.write(opener.open(url, timeout=60).read())
try:
    opener.open(closed, timeout=60)
except urllib.error.HTTPError as error:
    text = error.read()
    sys.exit(0 if error.code == 502 and b"connection refused" in text else (error.code, text))
sys.exit("a closed port is open")
"#;
    if !finds_program("python3", "urllib_gets_files_through_its_proxy_handler") {
        return;
    }
    let site = Site::start().await;
    let [proxy, _socks] = proxies(&site.world, "socks5h");
    let ([plain, secure], closed) = (site.urls(), site.closed_url("http"));
    let args = ["-c", SCRIPT, &proxy, &site.ca(), &closed, &plain, &secure];
    let printed = good("python3", &args);
    assert!(printed == file().repeat(2), "{} bytes", printed.len());
}

/// requests uses PySocks for SOCKS5, with names resolved by the proxy.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_gets_files_through_an_http_proxy_and_pysocks() {
    const TEST: &str = "requests_gets_files_through_an_http_proxy_and_pysocks";
    const SCRIPT: &str = r#"
import requests, sys
proxy, ca, closed, *urls = sys.argv[1:]
session = requests.Session()
session.trust_env = False
session.proxies = {"http": proxy, "https": proxy}
session.verify = ca
for url in urls:
    response = session.get(url, timeout=60)
    response.raise_for_status()
    sys.stdout.buffer.write(response.content)
try:
    text = session.get(closed, timeout=60).text
except requests.ConnectionError as error:
    text = str(error)
sys.exit(None if "connection refused" in text.lower() else text)
"#;
    if !finds_program("python3", TEST) {
        return;
    }
    let imported = run("python3", &["-c", "import requests, socks"]);
    if !imported.status.success() {
        skip(TEST, errors(&imported).trim());
        return;
    }
    let site = Site::start().await;
    let ([plain, secure], closed) = (site.urls(), site.closed_url("http"));
    for proxy in proxies(&site.world, "socks5h") {
        let args = ["-c", SCRIPT, &proxy, &site.ca(), &closed, &plain, &secure];
        let printed = good("python3", &args);
        let bytes = printed.len();
        assert!(printed == file().repeat(2), "{proxy}: {bytes} bytes");
    }
}

/// A bare repository `repository.git` in the folder, with one commit of one file; returns the commit.
fn repository(folder: &Path) -> String {
    let source = folder.join("source");
    let bare = folder.join("repository.git");
    let (source, bare) = (source.display().to_string(), bare.display().to_string());
    good("git", &["init", "--quiet", &source]);
    fs::write(Path::new(&source).join("file"), file()).expect("a file");
    good("git", &["-C", &source, "add", "file"]);
    let author = ["-c", "user.name=test", "-c", "user.email=test@invalid"];
    let commit = ["-C", &source, "commit", "--quiet", "--message=one"];
    good("git", &[&author[..], &commit].concat());
    good("git", &["clone", "--quiet", "--bare", &source, &bare]);
    good("git", &["-C", &bare, "update-server-info"]);
    let commit = good("git", &["-C", &bare, "rev-parse", "HEAD"]);
    let commit = String::from_utf8(commit).expect("hex digits");
    commit.trim().to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn git_lists_and_clones_over_https_through_each_proxy() {
    if !has_program("git", "git_lists_and_clones_over_https_through_each_proxy") {
        return;
    }
    let site = Site::start().await;
    let commit = repository(&site.folder);
    let url = format!("https://{NAME}:{}/repository.git", site.secure);
    let ca = format!("http.sslCAInfo={}", site.ca());
    // git prints how its HTTP library names a refused dial: the status of a CONNECT, or the code of a SOCKS5 reply.
    let refusals = ["502", "(5)"];
    for (proxy, refusal) in proxies(&site.world, "socks5h").iter().zip(refusals) {
        let setting = format!("http.proxy={proxy}");
        let through = ["-c", &setting, "-c", &ca];
        let git = |args: &[&str]| good("git", &[&through, args].concat());

        let listed = git(&["ls-remote", &url, "HEAD"]);
        let listed = String::from_utf8_lossy(&listed).into_owned();
        assert_eq!(listed, format!("{commit}\tHEAD\n"), "{proxy}");

        let clone = site.world.dir.path().join(format!("clone-{refusal}"));
        git(&["clone", "--quiet", &url, &clone.display().to_string()]);
        let cloned = fs::read(clone.join("file")).expect("a file");
        assert!(cloned == file(), "{proxy}: {} bytes", cloned.len());

        let closed = site.closed_url("https");
        let refused = run("git", &[&through[..], &["ls-remote", &closed]].concat());
        let errors = errors(&refused);
        assert!(!refused.status.success(), "{proxy}: a closed port is open");
        assert!(errors.contains(refusal), "{proxy}: {errors}");
    }
}

/// The handshake is with the target, and not with the proxy.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn openssl_s_client_sees_the_targets_certificate_through_a_connect() {
    const TEST: &str = "openssl_s_client_sees_the_targets_certificate_through_a_connect";
    if !finds_program("openssl", TEST) {
        return;
    }
    let site = Site::start().await;
    let (proxy, ca) = (site.world.server().frontends[0].to_string(), site.ca());
    let connect = |port| {
        let target = format!("{NAME}:{port}");
        let through = ["s_client", "-proxy", &proxy, "-connect", &target];
        let trust = ["-CAfile", &ca, "-verify_return_error"];
        let name = ["-servername", NAME, "-verify_hostname", NAME];
        run("openssl", &[&through[..], &trust, &name].concat())
    };
    let shown = connect(site.secure);
    let text = String::from_utf8_lossy(&shown.stdout);
    assert!(shown.status.success(), "{text}{}", errors(&shown));
    assert!(text.contains("Verify return code: 0 (ok)"), "{text}");
    let certificate = CertificateDer::from_pem_slice(&shown.stdout).expect("a certificate");
    let issued = CertificateDer::from_pem_file(site.world.files.cert("web"));
    assert_eq!(certificate, issued.expect("a certificate"));

    let refused = connect(site.closed);
    let errors = errors(&refused);
    assert!(!refused.status.success(), "a closed port is open");
    assert!(errors.contains("502"), "{errors}");
}
