//! Tests of chains with every usage, for both roles: one usage more than in rustls is accepted, and no other chain that
//! rustls refuses.

use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, Certificate, CertificateParams, CertificateRevocationListParams,
    CertifiedIssuer, DistinguishedName, DnType, ExtendedKeyUsagePurpose as Usage, IsCa,
    KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SerialNumber,
};

use super::*;
use crate::cause::TlsCause;
use crate::cipher::provider;
use adit_config::tls_policy::TlsPolicy;

type Issuer = CertifiedIssuer<'static, KeyPair>;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Parameters of a certificate for `server.example`, valid from yesterday until tomorrow.
#[expect(clippy::disallowed_methods, reason = "certificates have dates")]
fn params(name: &str, usages: &[Usage]) -> CertificateParams {
    let mut params = CertificateParams::new(["server.example".to_owned()]).unwrap();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.extended_key_usages = usages.to_vec();
    let now = SystemTime::now();
    (params.not_before, params.not_after) = ((now - DAY).into(), (now + DAY).into());
    params
}

fn ca_params(name: &str, usages: &[Usage]) -> CertificateParams {
    let mut params = params(name, usages);
    params.subject_alt_names.clear();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

fn key() -> KeyPair {
    KeyPair::generate().unwrap()
}

fn root() -> Issuer {
    Issuer::self_signed(ca_params("root", &[]), key()).unwrap()
}

fn issued(issuer: &Issuer, usages: &[Usage]) -> Certificate {
    params("leaf", usages).signed_by(&key(), issuer).unwrap()
}

fn store(anchor: &CertificateDer<'static>) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add(anchor.clone()).unwrap();
    roots
}

/// Whether both roles accept a chain, leaf first: as a server's chain for this name, and as a client's chain.
fn judged(
    anchor: &CertificateDer<'static>,
    chain: &[&CertificateDer<'static>],
    name: &'static str,
) -> [Result<(), Error>; 2] {
    let provider = provider(&TlsPolicy::default());
    let (own, intermediates) = chain.split_first().unwrap();
    let intermediates: Vec<_> = intermediates.iter().map(|one| (*one).clone()).collect();
    let name = ServerName::try_from(name).unwrap();
    let now = UnixTime::now();
    let servers = of_servers(store(anchor), Vec::new(), &provider).unwrap();
    let clients = of_clients(store(anchor), Vec::new(), false, &provider).unwrap();
    let server = servers.verify_server_cert(own, &intermediates, &name, &[], now);
    let client = clients.verify_client_cert(own, &intermediates, now);
    [server.map(|_verified| ()), client.map(|_verified| ())]
}

fn accepted(anchor: &CertificateDer<'static>, chain: &[&CertificateDer<'static>]) -> (bool, bool) {
    let [server, client] = judged(anchor, chain, "server.example");
    (server.is_ok(), client.is_ok())
}

fn refusals(judged: [Result<(), Error>; 2]) -> [CertificateError; 2] {
    judged.map(|judged| match judged {
        Err(Error::InvalidCertificate(why)) => why,
        other => panic!("not refused for its certificate: {other:?}"),
    })
}

#[test]
fn any_usage_is_every_usage() {
    let root = root();
    let both = [Usage::ServerAuth, Usage::ClientAuth];
    for (usages, expected) in [
        (&[][..], (true, true)),
        (&both[..1], (true, false)),
        (&both[1..], (false, true)),
        (&both, (true, true)),
        (&[Usage::Any], (true, true)),
        (&[Usage::CodeSigning, Usage::Any], (true, true)),
        (&[Usage::CodeSigning], (false, false)),
    ] {
        let leaf = issued(&root, usages);
        assert_eq!(accepted(root.der(), &[leaf.der()]), expected, "{usages:?}");
    }
}

/// Usages of an intermediate CA limit the usages of the certificates it signs.
#[test]
fn a_ca_for_any_usage_may_sign_for_every_usage() {
    let root = root();
    for (of_ca, of_leaf, expected) in [
        (Usage::Any, Usage::ServerAuth, (true, false)),
        (Usage::Any, Usage::ClientAuth, (false, true)),
        (Usage::Any, Usage::Any, (true, true)),
        (Usage::ServerAuth, Usage::Any, (true, false)),
        (Usage::CodeSigning, Usage::Any, (false, false)),
    ] {
        let of_ca = [of_ca];
        let ca = Issuer::signed_by(ca_params("ca", &of_ca), key(), &root).unwrap();
        let leaf = issued(&ca, std::slice::from_ref(&of_leaf));
        let found = accepted(root.der(), &[leaf.der(), ca.der()]);
        assert_eq!(found, expected, "{of_ca:?} {of_leaf:?}");
    }
}

#[test]
#[expect(clippy::disallowed_methods, reason = "certificates have dates")]
fn any_usage_bypasses_no_other_check() {
    let root = root();
    let leaf = issued(&root, &[Usage::Any]);
    // A chain signed by another CA, and a chain whose CA is missing.
    let other = Issuer::self_signed(ca_params("root", &[]), key()).unwrap();
    for anchor in [other.der(), self::root().der()] {
        let [server, client] = refusals(judged(anchor, &[leaf.der()], "server.example"));
        use CertificateError::{BadSignature, Other, UnknownIssuer};
        for why in [server, client] {
            let is_unsigned = matches!(why, UnknownIssuer | BadSignature | Other(_));
            assert!(is_unsigned, "{why:?}");
        }
    }
    // Another server name; clients have no name to check.
    let [server, client] = judged(root.der(), &[leaf.der()], "other.example");
    assert!(
        matches!(
            server,
            Err(Error::InvalidCertificate(
                CertificateError::NotValidForNameContext { .. }
            ))
        ),
        "{server:?}"
    );
    assert_eq!(client, Ok(()));
    let now = SystemTime::now();
    let mut expired = params("leaf", &[Usage::Any]);
    expired.not_after = (now - DAY / 2).into();
    let expired = expired.signed_by(&key(), &root).unwrap();
    for why in refusals(judged(root.der(), &[expired.der()], "server.example")) {
        let is_expired = matches!(why, CertificateError::ExpiredContext { .. });
        assert!(is_expired, "{why:?}");
    }
    // A CA certificate used as a leaf.
    let ca = Issuer::signed_by(ca_params("ca", &[Usage::Any]), key(), &root).unwrap();
    assert_eq!(accepted(root.der(), &[ca.der()]), (false, false));
    // A leaf certificate that signs.
    let signing = Issuer::signed_by(params("leaf", &[Usage::Any]), key(), &root).unwrap();
    let below = issued(&signing, &[Usage::Any]);
    let found = accepted(root.der(), &[below.der(), signing.der()]);
    assert_eq!(found, (false, false));
}

/// A router that leads to another installation, whose CA has another name or the same. With the right name only the CA is at fault.
#[test]
fn a_certificate_by_a_strange_ca_for_another_name_names_both() {
    let ours = root();
    let theirs = Issuer::self_signed(ca_params("theirs", &[]), key()).unwrap();
    for (theirs, of_ca) in [
        (&theirs, TlsCause::UnknownIssuer),
        (&root(), TlsCause::BadSignature),
    ] {
        let leaf = issued(theirs, &[Usage::ServerAuth]);
        let cause = |name| {
            let [server, _client] = judged(ours.der(), &[leaf.der()], name);
            TlsCause::of(&server.unwrap_err())
        };
        let stranger = TlsCause::Stranger {
            expected: "a.example".to_owned(),
            offered: vec!["server.example".to_owned()],
        };
        assert_eq!(cause("a.example"), stranger);
        assert_eq!(cause("server.example"), of_ca);
    }
}

/// Certificates as made by `openssl req -x509 -addext basicConstraints=CA:FALSE`, placed in the CA file of the peer.
#[test]
fn a_self_signed_certificate_is_accepted_unless_it_is_a_ca() {
    for usages in [&[][..], &[Usage::Any]] {
        let own = params("self", usages).self_signed(&key()).unwrap();
        assert_eq!(accepted(own.der(), &[own.der()]), (true, true));
        let ca = ca_params("self", usages).self_signed(&key()).unwrap();
        assert_eq!(accepted(ca.der(), &[ca.der()]), (false, false));
    }
}

#[test]
#[expect(clippy::disallowed_methods, reason = "revocation lists have dates")]
fn a_revoked_certificate_for_any_usage_is_refused() {
    let root = root();
    let now = SystemTime::now();
    let certificate = |serial: u64| {
        let mut params = params("leaf", &[Usage::Any]);
        params.serial_number = Some(SerialNumber::from(serial));
        params.signed_by(&key(), &root).unwrap()
    };
    let (revoked, sound) = (certificate(7), certificate(8));
    let list = CertificateRevocationListParams {
        this_update: (now - DAY).into(),
        next_update: (now + DAY).into(),
        crl_number: SerialNumber::from(1_u64),
        issuing_distribution_point: None,
        revoked_certs: vec![RevokedCertParams {
            serial_number: SerialNumber::from(7_u64),
            revocation_time: (now - DAY).into(),
            reason_code: None,
            invalidity_date: None,
        }],
        key_identifier_method: KeyIdMethod::Sha256,
    };
    let list = list.signed_by(&root).unwrap();
    let provider = provider(&TlsPolicy::default());
    let lists = vec![list.der().clone()];
    let clients = of_clients(store(root.der()), lists, false, &provider).unwrap();
    let judge = |leaf: &Certificate| {
        let judged = clients.verify_client_cert(leaf.der(), &[], UnixTime::now());
        judged.map(|_verified| ())
    };
    assert_eq!(judge(&sound), Ok(()));
    assert_eq!(judge(&revoked), Err(CertificateError::Revoked.into()));
    // No CRL of the signing CA, so the revocation status is unknown.
    let ca = Issuer::signed_by(ca_params("ca", &[]), key(), &root).unwrap();
    let below = issued(&ca, &[Usage::Any]);
    let judged = clients.verify_client_cert(below.der(), &[ca.der().clone()], UnixTime::now());
    let unknown = CertificateError::UnknownRevocationStatus.into();
    assert_eq!(judged.map(|_verified| ()), Err(unknown));
}

#[test]
fn client_certificates_are_requested_as_configured() {
    let root = root();
    let provider = provider(&TlsPolicy::default());
    for may_be_anonymous in [false, true] {
        let clients = of_clients(store(root.der()), Vec::new(), may_be_anonymous, &provider);
        let clients = clients.unwrap();
        assert!(clients.offer_client_auth());
        assert_eq!(clients.client_auth_mandatory(), !may_be_anonymous);
        assert_eq!(clients.root_hint_subjects().len(), 1);
    }
}
