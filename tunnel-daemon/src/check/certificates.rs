//! Certificates, keys and CAs of a command line: whether they are readable, match, and for how long they are valid.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::line::{degraded, missing, ok, refused};
use crate::agent::{agent_tls, client_tls};
use crate::listeners::server_tls;
use crate::status::model::Capability;
use adit_config::plan::{
    AgentPlan, AgentTls, ClientsPlan, FrontendListen, ProxyPlan, ServerPlan, TlsFiles,
};
use adit_config::tls_policy::TlsPolicy;
use adit_host::files::{OthersMay, others_may};
use adit_tls::inspect::{self, Inspected, Role};
use adit_tls::reload::{Reloadable, ReloadableClientTls};
use adit_tls::tls::{Alpn, TlsError};

/// A certificate is reported as about to expire with less time left than this.
const SOON: Duration = Duration::from_secs(30 * 24 * 3600);
const DAY_SECONDS: u64 = 24 * 3600;
const RENEW: &str = "renew it; it is read again while the process runs";
/// Names of a certificate that a line shows.
const NAMES_SHOWN: usize = 6;

/// Use of a certificate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Purpose {
    /// This program's certificate, presented to peers.
    Own(Role, Peers),
    /// A CA, which signs other certificates.
    Ca,
    /// A trust anchor of a bundle: its dates are not checked.
    Anchor,
}

/// Name of the lines about the connection to servers.
const SERVERS: &str = "server-connection";

/// Peers that verify the certificate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Peers {
    Adit,
    /// Upstream's programs or kube-apiserver.
    Go,
}

impl Peers {
    fn of(compat: bool) -> Self {
        if compat { Self::Go } else { Self::Adit }
    }
}

/// Adds the files of frontends.
fn of_clients<'a>(clients: &'a ClientsPlan, groups: &mut Vec<(&'static str, &'a TlsFiles, Peers)>) {
    for frontend in &clients.frontends {
        if let FrontendListen::Tcp {
            tls: Some(files), ..
        } = &frontend.listen
            && !groups.iter().any(|(_, known, _)| *known == files)
        {
            groups.push(("frontend", files, Peers::Go));
        }
    }
}

fn listeners(
    groups: &[(&'static str, &TlsFiles, Peers)],
    policy: &TlsPolicy,
    now: SystemTime,
) -> Vec<Capability> {
    let mut lines = Vec::new();
    for (name, files, peers) in groups {
        let loaded = Reloadable::load(server_tls(files, policy, Alpn::http11()));
        lines.push(pair(name, loaded, "certificate, key and CA fit"));
        let purpose = Purpose::Own(Role::Server, *peers);
        lines.extend(validity(name, &files.cert, purpose, now));
        lines.extend(key_access(name, &files.key));
        if let Some(ca) = &files.client_ca {
            lines.extend(validity(name, ca, Purpose::Anchor, now));
        }
    }
    lines
}

/// Lines about all files that a proxy reads.
pub(super) fn of_proxy(plan: &ProxyPlan, now: SystemTime) -> Vec<Capability> {
    let mut groups = Vec::new();
    of_clients(&plan.clients, &mut groups);
    let mut lines = listeners(&groups, &plan.tls, now);
    let loaded = client_tls(&plan.server_tls, plan.tls.clone(), Alpn::http11());
    lines.extend(towards_servers(&plan.server_tls, loaded, Peers::Go, now));
    if plan.server_tls.identity.is_none() {
        let line = degraded(
            "no client certificate: no server with an http-connect frontend on TLS takes this proxy",
            "give --client-cert and --client-key",
        );
        lines.push(line.named(SERVERS));
    }
    lines
}

/// Lines about what is shown to servers, and what they are verified by.
fn towards_servers(
    files: &AgentTls,
    loaded: Result<Arc<ReloadableClientTls>, TlsError>,
    peers: Peers,
    now: SystemTime,
) -> Vec<Capability> {
    let mut lines = vec![pair(SERVERS, loaded, "CA, certificate and key fit")];
    lines.extend(validity(SERVERS, &files.ca_cert, Purpose::Anchor, now));
    if let Some(own) = &files.identity {
        let purpose = Purpose::Own(Role::Client, peers);
        lines.extend(validity(SERVERS, &own.cert, purpose, now));
        lines.extend(key_access(SERVERS, &own.key));
    }
    lines
}

/// Lines about the files of kube-apiserver's egress configuration, and what its connections use unless a file is broken.
pub(super) fn of_kube_apiserver(
    files: &AgentTls,
    now: SystemTime,
) -> (Vec<Capability>, Option<Arc<ReloadableClientTls>>) {
    const RESTART: &str = "renew it, and restart kube-apiserver, which reads it at its start only";
    let loaded = client_tls(files, TlsPolicy::default(), Alpn::none());
    let usable = loaded.as_ref().ok().map(Arc::clone);
    let mut lines = towards_servers(files, loaded, Peers::Go, now);
    for line in &mut lines {
        if line.remedy.as_deref() == Some(RENEW) {
            line.remedy = Some(RESTART.to_owned());
        }
    }
    (lines, usable)
}

/// Lines about all files that a server reads.
pub(super) fn of_server(plan: &ServerPlan, now: SystemTime) -> Vec<Capability> {
    let agents = Peers::of(plan.compat);
    let mut groups: Vec<(&str, &TlsFiles, Peers)> = Vec::new();
    let port = plan.agents.port.iter();
    groups.extend(port.map(|port| ("agent-listener", &port.tls, agents)));
    let peers = plan.peers.iter();
    groups.extend(peers.map(|peers| ("peers", &peers.tls, Peers::of(false))));
    of_clients(&plan.clients, &mut groups);
    let mut lines = listeners(&groups, &plan.tls, now);
    let port = plan.agents.port.iter();
    let agents = port.map(|port| ("agent-crl", &port.tls, &plan.agents.crl));
    let peers = plan.peers.iter();
    let peers = peers.map(|peers| ("peer-crl", &peers.tls, &peers.crl));
    for (name, tls, crl) in agents.chain(peers) {
        if let (Some(ca), Some(crl)) = (&tls.client_ca, crl) {
            lines.push(revocation(name, ca, crl));
        }
    }
    lines
}

fn revocation(name: &'static str, ca: &Path, crl: &Path) -> Capability {
    let (flaws, shown) = (inspect::revocation(ca, crl), crl.display());
    let line = match flaws.as_deref() {
        Err(error) => missing(error.to_string(), "correct the file"),
        Ok([]) => ok(format!("{shown} has a current list of each CA")),
        Ok(flaws) => degraded(
            format!("{shown}: {}", flaws.join("; ")),
            "put a current list of that CA into the file",
        ),
    };
    line.named(name)
}

/// Lines about all files that an agent reads.
pub(super) fn of_agent(plan: &AgentPlan, now: SystemTime) -> Vec<Capability> {
    let mut lines = towards_servers(&plan.tls, agent_tls(plan), Peers::of(plan.compat), now);
    if plan.tls.identity.is_none() && plan.token_path.is_none() {
        let line = degraded(
            "no client certificate and no token: only a server that authenticates nobody takes this agent, and no lane is \
             possible",
            "give --agent-cert and --agent-key, or --token-path",
        );
        lines.push(line.named(SERVERS));
    }
    if let Some(path) = &plan.token_path {
        lines.push(token(path));
    }
    lines
}

/// A line about a key file that others than its owner may use.
fn key_access(name: &str, key: &Path) -> Option<Capability> {
    let shown = key.display();
    let line = match others_may(key)? {
        OthersMay::Write => degraded(
            format!(
                "{shown}: others than its owner may write this key, and so act as this program"
            ),
            format!("run chmod go-w {shown}"),
        ),
        OthersMay::Read => {
            let text = "all users of this host may read this key; chmod o-r prevents it";
            ok(format!("{shown}: {text}")).info()
        }
    };
    Some(line.named(name))
}

fn token(path: &Path) -> Capability {
    let shown = path.display();
    let line = match adit_host::files::open(path).and_then(std::io::read_to_string) {
        Ok(text) if text.trim().is_empty() => missing(
            format!("{shown} is empty"),
            "mount a projected service account token there",
        ),
        Ok(_token) => ok(format!("{shown} can be read")),
        Err(error) => missing(
            format!("cannot read {shown}: {error}"),
            "let this user read it",
        ),
    };
    line.named("token")
}

fn pair<T>(name: &str, loaded: Result<T, TlsError>, fine: &str) -> Capability {
    let line = match loaded {
        Ok(_loaded) => ok(fine),
        Err(error) => refused(&error, "replace the file"),
    };
    line.named(name)
}

fn validity(name: &str, path: &Path, purpose: Purpose, now: SystemTime) -> Vec<Capability> {
    // Unreadable files already have a line.
    let certificates = inspect::certificates(path).unwrap_or_default();
    let lines = certificates.iter().enumerate();
    let lines = lines.map(|(number, certificate)| {
        // After the first certificate come its issuers.
        let purpose = match purpose {
            Purpose::Anchor => Purpose::Anchor,
            first if number == 0 => first,
            _ => Purpose::Ca,
        };
        judge(path, certificate, purpose, now).named(name)
    });
    lines.collect()
}

fn judge(path: &Path, certificate: &Inspected, purpose: Purpose, now: SystemTime) -> Capability {
    let what = format!("{}: {:?}", path.display(), certificate.subject);
    let out_of_date = |text: String, remedy: &str| match purpose {
        Purpose::Anchor => degraded(text, remedy),
        Purpose::Own(..) | Purpose::Ca => missing(text, remedy),
    };
    if let Ok(early) = certificate.not_before.duration_since(now)
        && !early.is_zero()
    {
        return out_of_date(
            format!("{what} is not valid yet, for {} more", days(early)),
            "set the clock of this host, or wait",
        );
    }
    let Ok(left) = certificate.not_after.duration_since(now) else {
        let since = now.duration_since(certificate.not_after);
        let since = days(since.unwrap_or_default());
        return out_of_date(format!("{what} has expired, {since} ago"), RENEW);
    };
    let mut names = String::new();
    if let Purpose::Own(role, peers) = purpose {
        if let Some(flaw) = certificate.flaws(role).first() {
            let text = format!("{what} {flaw}");
            return match flaw.refused_by_go() || peers == Peers::Adit {
                true => missing(text, flaw.remedy()),
                false => degraded(text, flaw.remedy()),
            };
        }
        if role == Role::Server {
            names = format!(", for {}", listed(&certificate.names));
        }
    }
    let left_days = days(left);
    match left < SOON {
        true => degraded(format!("{what} expires in {left_days}{names}"), RENEW),
        false => ok(format!("{what} is valid for {left_days}{names}")),
    }
}

fn listed(names: &[String]) -> String {
    let shown: Vec<&str> = names.iter().take(NAMES_SHOWN).map(String::as_str).collect();
    let shown = shown.join(", ");
    match names.len().saturating_sub(NAMES_SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

fn days(time: Duration) -> String {
    match time.as_secs() / DAY_SECONDS {
        0 => "less than a day".to_owned(),
        1 => "1 day".to_owned(),
        days => format!("{days} days"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::model::Verdict;

    const DAY: Duration = Duration::from_secs(DAY_SECONDS);
    const SERVER: Purpose = Purpose::Own(Role::Server, Peers::Adit);
    const CLIENT: Purpose = Purpose::Own(Role::Client, Peers::Adit);

    fn inspected(not_before: SystemTime, not_after: SystemTime) -> Inspected {
        Inspected {
            issuer: String::new(),
            sha256: [0; 32],
            subject: "CN=server".to_owned(),
            names: Vec::new(),
            not_before,
            not_after,
            is_ca: false,
            is_version_3: true,
            may_serve: true,
            may_dial: true,
        }
    }

    /// The verdict on a certificate that is valid from ten days before now until `left` days after now.
    fn verdict(left: i64, purpose: Purpose, names: &[&str]) -> (Verdict, String) {
        let now = SystemTime::UNIX_EPOCH + 20_000 * DAY;
        let span = DAY * u32::try_from(left.unsigned_abs()).unwrap();
        let certificate = Inspected {
            names: names.iter().map(|name| (*name).to_owned()).collect(),
            ..inspected(
                now - 10 * DAY,
                if left < 0 { now - span } else { now + span },
            )
        };
        let line = judge(Path::new("/tls.crt"), &certificate, purpose, now);
        (line.verdict, line.text)
    }

    /// Limit (operations): Remaining days of a certificate below which `adit check` reports `degraded` | 30
    #[test]
    fn a_certificate_is_judged_by_its_remaining_days() {
        for (left, expected, part) in [
            (365, Verdict::Ok, "valid for 365 days"),
            (30, Verdict::Ok, "valid for 30 days"),
            (29, Verdict::Degraded, "expires in 29 days"),
            (0, Verdict::Degraded, "less than a day"),
            (-1, Verdict::Missing, "has expired, 1 day ago"),
        ] {
            let (verdict, text) = verdict(left, CLIENT, &[]);
            assert_eq!(verdict, expected, "{text}");
            assert!(text.contains(part), "{text}");
        }
    }

    /// As in a bundle of an old and a new CA: the old CA stays while certificates signed by it are in use.
    #[test]
    fn an_expired_ca_in_a_bundle_is_only_degraded() {
        let (expired, text) = verdict(-1, Purpose::Anchor, &[]);
        assert_eq!(expired, Verdict::Degraded, "{text}");
        assert_eq!(verdict(-1, Purpose::Ca, &[]).0, Verdict::Missing);
    }

    #[test]
    fn a_key_that_others_may_write_is_degraded() {
        use std::os::unix::fs::PermissionsExt as _;
        let key = tempfile::NamedTempFile::new().unwrap();
        let verdict = |mode| {
            let permissions = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(key.path(), permissions).unwrap();
            key_access("x", key.path()).map(|line| line.verdict)
        };
        assert_eq!(verdict(0o600), None);
        assert_eq!(verdict(0o660), Some(Verdict::Degraded));
        // Nothing, where the folder for such files is a tmpfs.
        assert!(matches!(verdict(0o644), Some(Verdict::Info) | None));
    }

    #[test]
    fn a_clock_that_is_behind_is_suspected() {
        let now = SystemTime::UNIX_EPOCH + 20_000 * DAY;
        let certificate = inspected(now + 2 * DAY, now + 9 * DAY);
        let line = judge(Path::new("/a"), &certificate, CLIENT, now);
        assert_eq!(line.verdict, Verdict::Missing);
        assert!(line.remedy.is_some_and(|remedy| remedy.contains("clock")));
    }

    #[test]
    fn only_a_servers_certificate_needs_names() {
        assert_eq!(verdict(365, SERVER, &[]).0, Verdict::Missing);
        assert_eq!(verdict(365, CLIENT, &[]).0, Verdict::Ok);
        assert_eq!(verdict(365, Purpose::Ca, &[]).0, Verdict::Ok);
        let many: Vec<String> = (0..9).map(|number| format!("dns:{number}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        let (_, text) = verdict(365, SERVER, &many);
        assert!(text.ends_with("dns:5 and 3 more"), "{text}");
    }

    #[test]
    fn flaws_that_only_adit_refuses_depend_on_the_peers() {
        let now = SystemTime::UNIX_EPOCH + 20_000 * DAY;
        let sound = Inspected {
            names: vec!["dns:a".to_owned()],
            ..inspected(now - DAY, now + 365 * DAY)
        };
        let verdict = |certificate: &Inspected, role, peers| {
            let purpose = Purpose::Own(role, peers);
            judge(Path::new("/a"), certificate, purpose, now).verdict
        };
        type Spoil = fn(&mut Inspected);
        let flaws: [(Spoil, [Verdict; 4]); 5] = [
            (|one| one.is_ca = true, [2, 1, 2, 1].map(by_rank)),
            (|one| one.is_version_3 = false, [2, 1, 2, 1].map(by_rank)),
            (|one| one.names.clear(), [2, 2, 0, 0].map(by_rank)),
            (|one| one.may_serve = false, [2, 2, 0, 0].map(by_rank)),
            (|one| one.may_dial = false, [0, 0, 2, 2].map(by_rank)),
        ];
        for (nth, (spoil, expected)) in flaws.into_iter().enumerate() {
            let mut certificate = sound.clone();
            spoil(&mut certificate);
            let found = [
                (Role::Server, Peers::Adit),
                (Role::Server, Peers::Go),
                (Role::Client, Peers::Adit),
                (Role::Client, Peers::Go),
            ];
            let found = found.map(|(role, peers)| verdict(&certificate, role, peers));
            assert_eq!(found, expected, "flaw {nth}");
        }
        assert_eq!(verdict(&sound, Role::Server, Peers::Adit), Verdict::Ok);
    }

    fn by_rank(rank: u8) -> Verdict {
        match rank {
            0 => Verdict::Ok,
            1 => Verdict::Degraded,
            _ => Verdict::Missing,
        }
    }
}
