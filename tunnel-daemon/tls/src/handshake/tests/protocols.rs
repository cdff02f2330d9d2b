//! Tests of the negotiated application protocol, version and cipher suite.

use std::io;
use std::sync::Arc;

use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::{Ended, World, handshake, loaded, shake, sockets, world};
use crate::{
    cause::TlsCause,
    handshake::accept_tls,
    stream::Socket,
    tls::{Alpn, AlpnRule, server_name},
};
use adit_config::limits::TLS_HANDSHAKE_TIMEOUT;
use adit_config::tls_policy::TlsPolicy;

fn no_protocol() -> Alpn {
    Alpn {
        protocols: vec![],
        rule: AlpnRule::Optional,
        records: None,
    }
}

/// Upstream (agents): A custom ALPN protocol is offered and selected.
#[tokio::test]
async fn custom_protocol_is_selected_by_a_listener_that_speaks_no_other() {
    let mut world = world();
    world.client.alpn = Alpn::grpc(&["x-konnectivity"]);
    world.server.alpn.protocols = vec![b"x-konnectivity".to_vec()];
    let (server, client) = shake(&world, "localhost").await;
    assert_eq!(server.unwrap().alpn(), Some(b"x-konnectivity".as_slice()));
    assert_eq!(client.unwrap().alpn(), Some(b"x-konnectivity".as_slice()));
}

#[tokio::test]
async fn peer_without_alpn_is_refused_by_grpc_and_served_by_http() {
    let mut world = world();
    world.client.alpn = no_protocol();
    let (server, _client) = shake(&world, "localhost").await;
    assert_eq!(server.unwrap_err().cause, TlsCause::NoProtocol);
    world.server.alpn = Alpn::http11();
    let (server, client) = shake(&world, "localhost").await;
    assert_eq!(server.unwrap().alpn(), None);
    client.unwrap();
}

#[tokio::test]
async fn client_that_needs_a_protocol_refuses_a_server_without_any() {
    let mut world = world();
    world.server.alpn = no_protocol();
    let (_server, client) = shake(&world, "localhost").await;
    assert_eq!(client.unwrap_err().cause, TlsCause::NoProtocol);
}

#[tokio::test]
async fn client_with_only_h2_fails_on_an_http11_listener() {
    let mut world = world();
    world.server.alpn = Alpn::http11();
    let (server, client) = shake(&world, "localhost").await;
    assert_eq!(server.unwrap_err().cause, TlsCause::NoCommonProtocol);
    assert_eq!(client.unwrap_err().cause, TlsCause::OursNoProtocol);
}

#[tokio::test]
async fn sides_without_a_common_version_refuse_each_other() {
    let mut world = world();
    world.server.policy = TlsPolicy::parse("VersionTLS13", &[], &mut Vec::new()).unwrap();
    let (server, client) = shake(&world, "localhost").await;
    let version = server.unwrap().tls_version();
    assert_eq!(version, Some(rustls::ProtocolVersion::TLSv1_3));
    client.unwrap();
    let (accepted, connected) = with_old_client(&world).await;
    assert!(accepted.is_err() && connected.is_err());
}

#[cfg(not(feature = "fips"))]
#[tokio::test]
async fn tls12_uses_the_suite_that_was_chosen() {
    let mut world = world();
    let suites = ["TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256"].map(str::to_owned);
    world.server.policy = TlsPolicy::parse("", &suites, &mut Vec::new()).unwrap();
    world.server.client_ca = None;
    let (accepted, connected) = with_old_client(&world).await;
    let version = accepted.unwrap().tls_version();
    assert_eq!(version, Some(rustls::ProtocolVersion::TLSv1_2));
    let suite = connected.unwrap().get_ref().1.negotiated_cipher_suite();
    let chosen = rustls::CipherSuite::TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256;
    assert_eq!(suite.unwrap().suite(), chosen);
}

/// A handshake with a client that supports TLS 1.2 at most.
async fn with_old_client(world: &World) -> (Ended, io::Result<TlsStream<Socket>>) {
    use rustls_pki_types::{CertificateDer, pem::PemObject};
    let mut roots = rustls::RootCertStore::empty();
    let authority = CertificateDer::from_pem_file(world.files.ca_file()).unwrap();
    roots.add(authority).unwrap();
    let provider = crate::cipher::provider(&TlsPolicy::default());
    let mut config = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS12])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let (server, _client) = loaded(world);
    let ((ours, _), (theirs, peer)) = sockets().await;
    let connector = TlsConnector::from(Arc::new(config));
    let accept = async { Ok(accept_tls(theirs, peer, &server, TLS_HANDSHAKE_TIMEOUT).await?) };
    tokio::join!(
        accept,
        connector.connect(server_name("localhost").unwrap(), ours)
    )
}

#[tokio::test]
async fn protocols_can_be_replaced_for_one_connection() {
    let mut world = world();
    world.server.alpn = Alpn::grpc(&["x-lane"]);
    let lane = Alpn::grpc::<&str>(&[]).records_beside("x-lane");
    let (accepted, connected) = handshake(&loaded(&world), "localhost", Some(&lane)).await;
    assert_eq!(accepted.unwrap().alpn(), Some(b"x-lane".as_slice()));
    connected.unwrap();
}
