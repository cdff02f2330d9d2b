//! Tests of the connection settings in a kubeconfig: a TLS server name, and a proxy.

mod support;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use adit_kube::access::{Api, Source};
use adit_kube::review_policy::{ReviewError, ReviewPolicy};
use adit_kube::reviewer::{Caller, Rate, ReviewEvents, ReviewResult, Reviewer};
use adit_kube::token::Token;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rcgen::{CertifiedKey, generate_simple_self_signed};
use serde_json::{Value, json};
use support::FakeApi;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};

const AGENT: &str = "system:serviceaccount:kube-system:konnectivity-agent";
const AUDIENCE: &str = "system:konnectivity-server";
/// The only name in the API server's certificate; it does not resolve.
const NAME: &str = "api.test";

struct Uncounted;

impl ReviewEvents for Uncounted {
    fn reviewed(&self, _result: ReviewResult, _time: Duration) {}
    fn in_flight(&self, _reviews: usize) {}
}

/// A TLS front of the plaintext API server, and a proxy that forwards every request to the front.
struct Ways {
    api: FakeApi,
    ca: String,
    tls: SocketAddr,
    proxy: SocketAddr,
    /// Destinations requested from the proxy.
    asked: Arc<Mutex<Vec<String>>>,
    _serving: JoinSet<()>,
}

impl Ways {
    async fn start() -> Self {
        let api = FakeApi::start().await;
        let CertifiedKey { cert, signing_key } =
            generate_simple_self_signed([NAME.to_owned()]).expect("it works");
        let key = PrivatePkcs8KeyDer::from(signing_key.serialize_der());
        let config = ServerConfig::builder()
            .with_no_client_auth()
            .with_single_cert(vec![cert.der().clone()], PrivateKeyDer::Pkcs8(key))
            .expect("it works");
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let mut serving = JoinSet::new();
        let front = TcpListener::bind("127.0.0.1:0").await.expect("it works");
        let (tls, behind) = (front.local_addr().expect("it works"), api.address);
        serving.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((socket, _peer)) = front.accept().await {
                let acceptor = acceptor.clone();
                connections.spawn(async move {
                    // Clients that reject the certificate disconnect.
                    let Ok(mut near) = acceptor.accept(socket).await else {
                        return;
                    };
                    let mut far = TcpStream::connect(behind).await.expect("it works");
                    drop(copy_bidirectional(&mut near, &mut far).await);
                });
            }
        });
        let proxying = TcpListener::bind("127.0.0.1:0").await.expect("it works");
        let proxy = proxying.local_addr().expect("it works");
        let asked = Arc::new(Mutex::new(Vec::new()));
        let note = Arc::clone(&asked);
        serving.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((mut near, _peer)) = proxying.accept().await {
                let note = Arc::clone(&note);
                connections.spawn(async move {
                    let mut head = Vec::new();
                    while !head.ends_with(b"\r\n\r\n") {
                        head.push(near.read_u8().await.expect("it works"));
                    }
                    let line = String::from_utf8(head).expect("it works");
                    note.lock()
                        .expect("it works")
                        .push(line.lines().next().expect("it works").to_owned());
                    near.write_all(b"HTTP/1.1 200 OK\r\n\r\n")
                        .await
                        .expect("it works");
                    let mut far = TcpStream::connect(tls).await.expect("it works");
                    drop(copy_bidirectional(&mut near, &mut far).await);
                });
            }
        });
        Self {
            api,
            ca: STANDARD.encode(cert.pem()),
            tls,
            proxy,
            asked,
            _serving: serving,
        }
    }

    /// Reviews a token with a kubeconfig for this cluster and the front's `certificate-authority-data`.
    async fn review(&self, mut cluster: Value) -> Result<(), ReviewError> {
        cluster["certificate-authority-data"] = self.ca.clone().into();
        let mut config: Value = serde_json::from_str(&self.api.kubeconfig()).expect("it works");
        config["clusters"][0]["cluster"] = cluster;
        let folder = tempfile::tempdir().expect("it works");
        let file = folder.path().join("kubeconfig");
        std::fs::write(&file, config.to_string()).expect("it works");
        let api = Api::open(Source::Kubeconfig(file)).await.expect("it works");
        assert_eq!(api.risk().await, None);
        let policy = ReviewPolicy {
            namespace: "kube-system".to_owned(),
            service_account: "konnectivity-agent".to_owned(),
            audience: AUDIENCE.to_owned(),
        };
        let rate = Rate {
            per_second: 0.0,
            burst: 0,
        };
        let reviewer = Reviewer::new(api, policy, rate, Arc::new(Uncounted));
        let token = Token::new(self.api.issue(AGENT, AUDIENCE, "node-1"));
        let caller = Caller {
            address: None,
            is_trusted: false,
        };
        reviewer.review(&token, caller).await.map(|_account| ())
    }
}

#[tokio::test]
async fn tls_server_name_overrides_the_name_in_the_server_url() {
    let ways = Ways::start().await;
    let server = format!("https://{}", ways.tls);
    ways.review(json!({"server": server, "tls-server-name": NAME}))
        .await
        .unwrap();
    for wrong in [
        json!({"server": server}),
        json!({"server": server, "tls-server-name": "other.test"}),
    ] {
        let refused = ways.review(wrong).await.unwrap_err().to_string();
        assert!(refused.contains("certificate"), "{refused}");
    }
    assert_eq!(ways.api.reviews(), 1);
}

#[tokio::test]
async fn the_proxy_of_a_kubeconfig_resolves_the_server_name() {
    let ways = Ways::start().await;
    let proxy = format!("http://{}", ways.proxy);
    ways.review(json!({"server": format!("https://{NAME}:6443"), "proxy-url": proxy}))
        .await
        .unwrap();
    let asked = ways.asked.lock().unwrap().clone();
    assert_eq!(asked, ["CONNECT api.test:6443 HTTP/1.1"]);
}
