//! Tests of handshakes between both sides over a loopback connection, with throw-away certificates.

mod protocols;

use super::*;
use crate::{
    reload::Reloadable,
    tls::{Alpn, ClientTls, ServerTls, server_name},
};
use adit_config::limits::TLS_HANDSHAKE_TIMEOUT;
use adit_config::tls_policy::TlsPolicy;
use adit_testkit::certificates::{ThrowawayCa, ThrowawayFiles, Usage};
use rustls::time_provider::TimeProvider;
use rustls_pki_types::UnixTime;
use std::{net::Ipv4Addr, sync::Arc};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

struct World {
    files: ThrowawayFiles,
    server: ServerTls,
    client: ClientTls,
}

/// A server that requires client certificates and a client with one, both for gRPC.
fn world() -> World {
    let files = ThrowawayFiles::create(&["localhost".to_owned(), "127.0.0.1".to_owned()]).unwrap();
    let no_extra: [&str; 0] = [];
    let server = ServerTls {
        cert: files.cert("server"),
        key: files.key("server"),
        client_ca: Some(files.ca_file()),
        client_crl: None,
        client_may_be_anonymous: false,
        policy: TlsPolicy::default(),
        alpn: Alpn::grpc(&no_extra),
    };
    let client = ClientTls {
        crl: None,
        ca: files.ca_file(),
        identity: Some((files.cert("agent"), files.key("agent"))),
        policy: TlsPolicy::default(),
        alpn: Alpn::grpc(&no_extra),
    };
    World {
        files,
        server,
        client,
    }
}

async fn sockets() -> ((Socket, PeerAddr), (Socket, PeerAddr)) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let (client, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
    let (server, peer) = accepted.unwrap();
    (
        (Socket::Tcp(client.unwrap()), PeerAddr::Tcp(address)),
        (Socket::Tcp(server), PeerAddr::Tcp(peer)),
    )
}

type Ended = Result<ByteStream, HandshakeError>;

/// The cause that an established connection reports, or that of its socket.
fn read_failed(error: io::Error) -> HandshakeError {
    let cause = error.get_ref().and_then(|inner| inner.downcast_ref());
    let of_socket = || TlsCause::of_handshake(&error);
    cause.cloned().unwrap_or_else(of_socket).into()
}

/// Both sides of one handshake against `host`, up to the first byte from the server. With TLS 1.3 only that byte shows a
/// client whether the server accepted its certificate.
async fn shake(world: &World, host: &str) -> (Ended, Ended) {
    let (server, client) = loaded(world);
    shake_once_more(&server, &client, host).await
}

fn loaded(world: &World) -> (Arc<ReloadableServerTls>, Arc<ReloadableClientTls>) {
    let server = Reloadable::load(world.server.clone()).unwrap();
    (server, Reloadable::load(world.client.clone()).unwrap())
}

/// Both sides of one handshake against `host`, with these protocols for the connection if given.
async fn handshake(
    (server, client): &(Arc<ReloadableServerTls>, Arc<ReloadableClientTls>),
    host: &str,
    alpn: Option<&Alpn>,
) -> (Ended, Ended) {
    let ((ours, server_address), (theirs, client_address)) = sockets().await;
    let (name, limit) = (server_name(host).unwrap(), TLS_HANDSHAKE_TIMEOUT);
    let accept = async { Ok(accept_tls(theirs, client_address, server, limit).await?) };
    tokio::join!(
        accept,
        connect_tls(ours, server_address, client, name, alpn, limit)
    )
}

/// Why both sides failed.
fn causes((server, client): (Ended, Ended)) -> [TlsCause; 2] {
    [server, client].map(|ended| ended.unwrap_err().cause)
}

/// Like [`shake`], between two sides that may resume a session.
async fn shake_once_more(
    server: &ReloadableServerTls,
    client: &ReloadableClientTls,
    host: &str,
) -> (Ended, Ended) {
    let ((client_socket, server_address), (server_socket, client_address)) = sockets().await;
    let limit = TLS_HANDSHAKE_TIMEOUT;
    let serve = async {
        let mut stream = accept_tls(server_socket, client_address, server, limit).await?;
        let of = |error| HandshakeError::of(&error);
        stream.write_all(b"!").await.map_err(of)?;
        stream.flush().await.map_err(of)?;
        Ok(stream)
    };
    let connect = async {
        let name = server_name(host).unwrap();
        let connecting = connect_tls(client_socket, server_address, client, name, None, limit);
        let mut stream = connecting.await?;
        stream.read_u8().await.map_err(read_failed)?;
        Ok(stream)
    };
    tokio::join!(serve, connect)
}

#[tokio::test]
async fn both_sides_with_right_certificates_agree_on_h2_and_know_each_other() {
    let (server, client) = shake(&world(), "localhost").await;
    let (server, client) = (server.unwrap(), client.unwrap());
    for (stream, peer) in [(&server, "agent"), (&client, "server")] {
        assert_eq!(stream.alpn(), Some(b"h2".as_slice()));
        let principal = stream.principal().unwrap();
        assert_eq!(principal.common_name.as_deref(), Some(peer));
    }
    assert_eq!(server.tls_version(), Some(rustls::ProtocolVersion::TLSv1_3));
    assert!(server.tcp().is_some() && client.tcp().is_some());
}

#[tokio::test]
async fn client_without_certificate_is_refused_when_a_ca_is_given() {
    let mut world = world();
    world.client.identity = None;
    let ended = causes(shake(&world, "localhost").await);
    let expected = [TlsCause::NoCertificate, TlsCause::CertificateRequired];
    assert_eq!(ended, expected);
}

#[tokio::test]
async fn client_of_another_ca_is_refused() {
    let other = world();
    let mut world = world();
    world.client.identity = Some((other.files.cert("agent"), other.files.key("agent")));
    let ended = causes(shake(&world, "localhost").await);
    // Throw-away CAs have one name.
    assert_eq!(ended, [TlsCause::BadSignature, TlsCause::NotOfThatCa]);
}

#[tokio::test]
async fn server_certificate_is_no_client_certificate() {
    let mut world = world();
    world.client.identity = Some((world.files.cert("server"), world.files.key("server")));
    let ended = causes(shake(&world, "localhost").await);
    assert_eq!(ended, [TlsCause::WrongUsage, TlsCause::OursUnsupported]);
}

/// With TLS 1.3 a client writes before it knows whether the server accepts its certificate.
#[tokio::test]
async fn a_failed_write_reports_the_alert_that_lies_unread_behind_it() {
    let mut world = world();
    world.client.identity = None;
    let (accepted, connected) = handshake(&loaded(&world), "localhost", None).await;
    assert!(accepted.is_err(), "the server has closed its socket");
    let mut stream = connected.unwrap();
    let write_until_it_fails = async {
        loop {
            stream.write_all(b"preface").await?;
            stream.flush().await?;
            // The answer to what was written, a reset, comes through the runtime's driver.
            tokio::task::yield_now().await;
        }
    };
    let failed: io::Result<()> = tokio::time::timeout(TLS_HANDSHAKE_TIMEOUT, write_until_it_fails)
        .await
        .expect("the socket is reset");
    let text = failed.unwrap_err().to_string();
    assert_eq!(text, TlsCause::CertificateRequired.to_string());
}

/// Closed at once, the socket would be reset.
///
/// Limit (times): A refused client of a TLS listener | has 1 s to read the alert, without a handshake slot
#[tokio::test]
async fn a_client_that_goes_on_sending_reads_the_alert_and_the_end() {
    let (server, _client) = loaded(&world());
    let ((client, _at), (socket, peer)) = sockets().await;
    let Socket::Tcp(mut client) = client else {
        panic!("a TCP socket");
    };
    client.write_all(b"GET / HTTP/1.1\r\n").await.unwrap();
    let accepting = accept_tls(socket, peer, &server, TLS_HANDSHAKE_TIMEOUT);
    let failed = accepting.await.expect_err("no TLS");
    assert_eq!(failed.error.cause, TlsCause::NotTls);
    let reads = async {
        client.write_all(b"Host: a\r\n\r\n").await?;
        client.write_all(b"and a body").await?;
        let mut alert = Vec::new();
        client.read_to_end(&mut alert).await?;
        client.shutdown().await?;
        Ok::<_, io::Error>(alert)
    };
    let ((), read) = tokio::join!(failed.close(), reads);
    // A record of type "alert".
    assert_eq!(read.unwrap().first(), Some(&21));
}

#[tokio::test]
async fn a_wrong_name_is_reported_with_the_names_of_the_certificate() {
    let (_server, client) = shake(&world(), "elsewhere.example").await;
    assert_eq!(
        client.unwrap_err().cause,
        TlsCause::WrongName {
            expected: "elsewhere.example".to_owned(),
            offered: vec!["localhost".to_owned(), "127.0.0.1".to_owned()],
        }
    );
}

#[tokio::test]
async fn without_a_client_ca_no_client_certificate_is_requested() {
    let mut world = world();
    world.server.client_ca = None;
    world.client.identity = None;
    let (server, client) = shake(&world, "localhost").await;
    assert_eq!(server.unwrap().principal(), None);
    client.unwrap();
}

#[tokio::test]
async fn server_of_another_ca_is_refused() {
    let other = world();
    let mut world = world();
    world.client.ca = other.files.ca_file();
    let (server, client) = shake(&world, "localhost").await;
    assert!(server.is_err() && client.is_err());
}

#[tokio::test]
async fn addresses_are_checked_against_the_ip_names_of_the_certificate() {
    let world = world();
    let (server, client) = shake(&world, "127.0.0.1").await;
    assert!(server.is_ok() && client.is_ok());
    for foreign in ["127.0.0.2", "example.org"] {
        let (_server, client) = shake(&world, foreign).await;
        assert!(client.is_err(), "{foreign}");
    }
}

#[tokio::test]
async fn server_name_is_sent_for_hosts_only() {
    for (host, sent) in [("localhost", Some("localhost")), ("127.0.0.1", None)] {
        let (server, _client) = shake(&world(), host).await;
        let Ok(ByteStream::Tls(tls)) = server else {
            panic!("the handshake failed")
        };
        assert_eq!(tls.sni(), sent);
    }
}

#[tokio::test]
async fn both_ends_export_the_same_keying_material_per_connection() {
    let world = world();
    let mut seen = Vec::new();
    for _ in 0..2 {
        let (server, client) = shake(&world, "localhost").await;
        let [at_server, at_client] = [server.unwrap(), client.unwrap()].map(|stream| {
            let (tls, mut material) = (stream.as_tls().unwrap(), [0; 32]);
            tls.export_keying_material(b"EXPORTER-test", b"", &mut material)
                .unwrap();
            material
        });
        assert_eq!(at_server, at_client);
        seen.push(at_server);
    }
    assert_ne!(seen.first(), seen.last());
}

/// Limit (times): TLS handshake, with the wait for the first byte and a slot
#[tokio::test(start_paused = true)]
async fn silent_peer_is_dropped_at_the_deadline() {
    let server = Reloadable::load(world().server).unwrap();
    let ((_silent, _), (socket, peer)) = sockets().await;
    let failed = accept_tls(socket, peer, &server, TLS_HANDSHAKE_TIMEOUT).await;
    let error = failed.unwrap_err().error;
    let after = TLS_HANDSHAKE_TIMEOUT;
    assert_eq!(error.cause, TlsCause::TimedOut { after });
    assert_eq!(io::Error::from(error).kind(), io::ErrorKind::TimedOut);
}

#[tokio::test]
async fn peer_that_speaks_no_tls_is_an_error() {
    let server = Reloadable::load(world().server).unwrap();
    let ((mut client, _), (socket, peer)) = sockets().await;
    client.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    let failed = accept_tls(socket, peer, &server, TLS_HANDSHAKE_TIMEOUT).await;
    assert_eq!(failed.unwrap_err().error.cause, TlsCause::NotTls);
}

#[tokio::test]
async fn megabytes_pass_intact_in_both_directions() {
    let (server, client) = shake(&world(), "localhost").await;
    let (mut server, mut client) = (server.unwrap(), client.unwrap());
    let sent: Vec<u8> = (0..3_000_000_u32)
        .map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()[3])
        .collect();
    let echo = async {
        let mut received = vec![0; sent.len()];
        server.read_exact(&mut received).await.unwrap();
        server.write_all(&received).await.unwrap();
        server.shutdown().await.unwrap();
    };
    let ask = async {
        client.write_all(&sent).await.unwrap();
        client.flush().await.unwrap();
        let mut received = Vec::new();
        client.read_to_end(&mut received).await.unwrap();
        received
    };
    let ((), received) = tokio::join!(echo, ask);
    assert!(received == sent, "the bytes differ");
}

/// Upstream (configuration): Replaced certificates, CAs, tokens and kubeconfigs are used from the next handshake on.
#[tokio::test]
async fn next_handshake_uses_replaced_files_of_both_sides() {
    use crate::reload::{Reload, Reloaded};
    let world = world();
    let (files, sides) = (&world.files, loaded(&world));
    for (name, usage, own) in [
        ("server", Usage::Server, "renewed.example"),
        ("agent", Usage::Client, "renewed-agent"),
    ] {
        files.issue(name, usage, &[own.to_owned()]).unwrap();
    }
    assert_eq!(sides.0.reload_now().unwrap(), Reloaded::Replaced);
    assert_eq!(sides.1.reload_now().unwrap(), Reloaded::Replaced);
    let (accepted, connected) = handshake(&sides, "renewed.example", None).await;
    connected.unwrap();
    let accepted = accepted.unwrap();
    assert_eq!(accepted.principal().unwrap().names, ["dns:renewed-agent"]);
}

/// The system's clock, moved forward.
#[derive(Debug)]
struct Ahead(Duration);

impl TimeProvider for Ahead {
    fn current_time(&self) -> Option<UnixTime> {
        let now = Duration::from_secs(UnixTime::now().as_secs());
        Some(UnixTime::since_unix_epoch(now + self.0))
    }
}

fn is_resumed(stream: &Ended) -> bool {
    let Ok(ByteStream::Tls(tls)) = stream else {
        panic!("no TLS connection: {stream:?}")
    };
    tls.is_resumed()
}

#[tokio::test]
async fn no_session_is_resumed_after_its_certificate_has_expired() {
    let world = world();
    let (server, client) = loaded(&world);
    let (accepted, connected) = shake_once_more(&server, &client, "localhost").await;
    assert!(!is_resumed(&accepted));
    connected.unwrap();
    let at = |ahead| -> Arc<dyn TimeProvider> { Arc::new(Ahead(ahead)) };
    // Throw-away certificates are valid for a day.
    server.set_clock(&at(Duration::from_secs(48 * 60 * 60)));
    for _attempt in 0..2 {
        let (accepted, connected) = shake_once_more(&server, &client, "localhost").await;
        // No session is resumed: the certificate itself is checked.
        assert_eq!(accepted.unwrap_err().cause, TlsCause::Expired);
        assert!(connected.is_err());
    }
    server.set_clock(&at(Duration::ZERO));
    let (accepted, connected) = shake_once_more(&server, &client, "localhost").await;
    accepted.unwrap();
    connected.unwrap();
}

/// A client whose self-signed certificate expires before all others, after some hours.
#[expect(clippy::disallowed_methods, reason = "certificates have dates")]
fn short_lived(world: &World, hours: u64) -> ClientTls {
    use rcgen::{CertificateParams, KeyPair};
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    let now = std::time::SystemTime::now();
    params.not_before = (now - Duration::from_secs(60)).into();
    params.not_after = (now + Duration::from_secs(hours * 3600)).into();
    let key = KeyPair::generate().unwrap();
    let certificate = params.self_signed(&key).unwrap();
    let (cert_path, key_path) = (world.files.cert("short"), world.files.key("short"));
    std::fs::write(&cert_path, certificate.pem()).unwrap();
    std::fs::write(&key_path, key.serialize_pem()).unwrap();
    // The certificate acts as its own CA for the server.
    let bundle = format!("{}{}", world.files.ca().cert_pem(), certificate.pem());
    std::fs::write(world.files.ca_file(), bundle).unwrap();
    ClientTls {
        crl: None,
        identity: Some((cert_path, key_path)),
        ..world.client.clone()
    }
}

#[tokio::test]
async fn an_expired_session_does_not_affect_other_sessions() {
    let world = world();
    let short = short_lived(&world, 2);
    let server = Reloadable::load(world.server.clone()).unwrap();
    let expiring = Reloadable::load(short).unwrap();
    let others: Vec<_> = (0..3)
        .map(|_agent| Reloadable::load(world.client.clone()).unwrap())
        .collect();
    for client in others.iter().chain([&expiring]) {
        let (accepted, _connected) = shake_once_more(&server, client, "localhost").await;
        assert!(!is_resumed(&accepted));
        let (accepted, _connected) = shake_once_more(&server, client, "localhost").await;
        assert!(is_resumed(&accepted), "each can be resumed while valid");
    }
    let later: Arc<dyn TimeProvider> = Arc::new(Ahead(Duration::from_secs(3 * 3600)));
    server.set_clock(&later);
    let (accepted, connected) = shake_once_more(&server, &expiring, "localhost").await;
    assert!(accepted.is_err() && connected.is_err());
    for client in &others {
        let (accepted, connected) = shake_once_more(&server, client, "localhost").await;
        assert!(is_resumed(&accepted));
        connected.unwrap();
    }
}

/// After a change of CAs each client certificate is verified again; the server's own certificate does not affect client
/// sessions.
#[tokio::test]
async fn sessions_survive_a_server_renewal_but_no_change_of_its_cas() {
    use crate::reload::{Reload, Reloaded};
    let world = world();
    let (server, client) = loaded(&world);
    let (accepted, _connected) = shake_once_more(&server, &client, "localhost").await;
    assert!(!is_resumed(&accepted));
    let names = ["localhost".to_owned()];
    world.files.issue("server", Usage::Server, &names).unwrap();
    assert_eq!(server.reload_now().unwrap(), Reloaded::Replaced);
    let (accepted, _connected) = shake_once_more(&server, &client, "localhost").await;
    assert!(is_resumed(&accepted));
    let other = ThrowawayCa::new("other").unwrap();
    let bundle = format!("{}{}", world.files.ca().cert_pem(), other.cert_pem());
    std::fs::write(world.files.ca_file(), bundle).unwrap();
    assert_eq!(server.reload_now().unwrap(), Reloaded::Replaced);
    let (accepted, connected) = shake_once_more(&server, &client, "localhost").await;
    assert!(!is_resumed(&accepted));
    connected.unwrap();
}

#[tokio::test]
async fn tls_works_over_unix_sockets() {
    let world = world();
    let (server, client) = loaded(&world);
    let (ours, theirs) = tokio::net::UnixStream::pair().unwrap();
    let name = server_name("localhost").unwrap();
    let (ours, theirs) = (Socket::Unix(ours), Socket::Unix(theirs));
    let limit = TLS_HANDSHAKE_TIMEOUT;
    let (accepted, connected) = tokio::join!(
        accept_tls(ours, PeerAddr::Unix, &server, limit),
        connect_tls(theirs, PeerAddr::Unix, &client, name, None, limit),
    );
    assert_eq!(accepted.unwrap().peer(), PeerAddr::Unix);
    assert!(connected.unwrap().tcp().is_none());
}

#[test]
fn configurations_are_shared_not_copied() {
    let server = Reloadable::load(world().server).unwrap();
    assert!(Arc::ptr_eq(&server.current(), &server.current()));
}
