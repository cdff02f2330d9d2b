//! `adit pki`: certificates of an installation.

use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use adit_config::{PkiClient, PkiOptions, PkiServer, PkiSigning};
use adit_tls::inspect::{self, Inspected};
use adit_tls::pki::{self, Authority, Wanted, Written};
use adit_tls::selfsigned::Usage;
use anyhow::Context as _;

use crate::status::text::{clean, show};

/// Seconds until the end of year 9999: the last time of RFC 3339, and the expiry of certificates without one (RFC 5280).
const LAST_SECOND: u64 = 253_402_300_799;

/// Creates or shows what the command line asks for.
///
/// # Errors
/// Nothing was created: a file exists, an authority is missing or a name is invalid. Or a file cannot be shown.
pub(crate) fn run(options: &PkiOptions) -> anyhow::Result<ExitCode> {
    let text = match options {
        PkiOptions::Init(init) => {
            let written = listed(&pki::init(&init.dir, init.days)?);
            let dir = init.dir.display();
            format!(
                "{written}keep the keys off the cluster; next: adit pki server --dir {dir} NAME...\n"
            )
        }
        PkiOptions::Server(server) => issue_server(server)?,
        PkiOptions::Agent(agent) => {
            let stem = format!("agent-{}", agent.id);
            let wanted = client(&stem, Authority::Agents, &agent.id);
            let written = issue(&agent.signing, &[wanted])?;
            let dir = &agent.signing.dir;
            format!(
                "{written}flags of the agent:\n  --ca-cert={} --agent-cert={} --agent-key={}\n",
                file(dir, Authority::Agents.stem(), "crt"),
                file(dir, &stem, "crt"),
                file(dir, &stem, "key"),
            )
        }
        PkiOptions::Client(PkiClient { name, signing }) => {
            let wanted = client(&format!("client-{name}"), Authority::Clients, name);
            let written = issue(signing, &[wanted])?;
            let ca = file(&signing.dir, Authority::Clients.stem(), "crt");
            format!("{written}the client verifies the server by {ca}\n")
        }
        PkiOptions::Show(options) => {
            let files = options.files.iter().map(|path| shown_file(path));
            files.collect::<anyhow::Result<String>>()?
        }
    };
    show(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn issue(signing: &PkiSigning, wanted: &[Wanted]) -> anyhow::Result<String> {
    Ok(listed(&pki::issue(&signing.dir, signing.days, wanted)?))
}

fn client(stem: &str, authority: Authority, common_name: &str) -> Wanted {
    Wanted {
        stem: stem.to_owned(),
        authority,
        usage: Usage::Client,
        common_name: common_name.to_owned(),
        names: Vec::new(),
    }
}

fn issue_server(server: &PkiServer) -> anyhow::Result<String> {
    let sides = sides(server);
    let wanted = sides.iter().map(|side| Wanted {
        stem: side.stem.clone(),
        authority: side.authority,
        usage: side.usage,
        common_name: "adit-server".to_owned(),
        names: server.names.clone(),
    });
    let wanted: Vec<Wanted> = wanted.collect();
    Ok(issue(&server.signing, &wanted)? + &server_flags(&server.signing.dir, &sides))
}

/// Those to whom a server shows a certificate.
struct Side {
    towards: &'static str,
    /// Beginning of the flags.
    flag: &'static str,
    /// The name of the files without their endings.
    stem: String,
    authority: Authority,
    usage: Usage,
}

/// All sides of a server. Without an authority of peers, in a folder of an earlier release, there are none.
fn sides(server: &PkiServer) -> Vec<Side> {
    let mut sides = vec![
        Side {
            towards: "towards agents",
            flag: "cluster",
            stem: format!("{}-cluster", server.file),
            authority: Authority::Agents,
            usage: Usage::Server,
        },
        Side {
            towards: "towards clients on TCP",
            flag: "server",
            stem: server.file.clone(),
            authority: Authority::Clients,
            usage: Usage::Server,
        },
    ];
    if Authority::Peers.is_in(&server.signing.dir) {
        sides.push(Side {
            towards: "towards peers",
            flag: "peer",
            stem: format!("{}-peer", server.file),
            authority: Authority::Peers,
            usage: Usage::Peer,
        });
    }
    sides
}

fn server_flags(dir: &Path, sides: &[Side]) -> String {
    let towards: Vec<&str> = sides.iter().map(|side| side.towards).collect();
    let mut text = format!("flags of the server, {}:\n", towards.join(", then "));
    for side in sides {
        let flag = side.flag;
        text.push_str(&format!(
            "  --{flag}-cert={} --{flag}-key={} --{flag}-ca-cert={}\n",
            file(dir, &side.stem, "crt"),
            file(dir, &side.stem, "key"),
            file(dir, side.authority.stem(), "crt"),
        ));
    }
    text
}

fn file(dir: &Path, stem: &str, ending: &str) -> String {
    dir.join(format!("{stem}.{ending}")).display().to_string()
}

fn listed(written: &[Written]) -> String {
    let mut text = String::new();
    for file in written {
        let until = file.not_after.map_or_else(
            || ", readable for this user alone".to_owned(),
            |end| format!(", valid until {}", time(end)),
        );
        text.push_str(&format!("wrote {}{until}\n", file.path.display()));
    }
    text
}

#[expect(clippy::disallowed_methods, reason = "certificates have dates")]
fn shown_file(path: &Path) -> anyhow::Result<String> {
    let certificates =
        inspect::certificates(path).with_context(|| format!("cannot read {}", path.display()))?;
    anyhow::ensure!(
        !certificates.is_empty(),
        "{} has no certificate that can be read: give a PEM file of certificates",
        path.display()
    );
    let mut text = String::new();
    for one in &certificates {
        let _infallible = write!(
            text,
            "{}\n{}\n",
            path.display(),
            shown(one, SystemTime::now())
        );
    }
    Ok(text)
}

/// One line for each property.
fn shown(one: &Inspected, now: SystemTime) -> String {
    let subject = if one.subject.is_empty() {
        "none"
    } else {
        &one.subject
    };
    let names = if one.names.is_empty() {
        "none".to_owned()
    } else {
        one.names.join(", ")
    };
    let use_ = match (one.is_ca, one.may_serve, one.may_dial) {
        (true, ..) => "authority",
        (false, true, true) => "server, client",
        (false, true, false) => "server",
        (false, false, true) => "client",
        (false, false, false) => "neither server nor client",
    };
    let left = inspect::days_left(one.not_after, now);
    let left = left.map_or_else(|| "expired".to_owned(), |days| days.to_string());
    let hash: String = one
        .sha256
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let validity = format!("{} to {}", time(one.not_before), time(one.not_after));
    let lines = [
        ("subject", subject),
        ("issuer", &one.issuer),
        ("names", &names),
        ("use", use_),
        ("valid", &validity),
        ("days left", &left),
        ("sha256", &hash),
    ];
    let line = |(name, value): (&str, &str)| format!("  {name:<10} {}\n", clean(value, usize::MAX));
    lines.map(line).concat()
}

/// Formats a time as RFC 3339, to the second.
fn time(at: SystemTime) -> humantime::Rfc3339Timestamp {
    let last = SystemTime::UNIX_EPOCH + Duration::from_secs(LAST_SECOND);
    humantime::format_rfc3339_seconds(at.min(last))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder of an earlier release has no authority of peers, and goes on as before.
    #[test]
    fn a_server_has_a_certificate_for_peers_if_their_authority_is_there() {
        let dir = tempfile::tempdir().unwrap();
        pki::init(dir.path(), 30).unwrap();
        let issued = |file: &str| {
            let server = PkiServer {
                signing: PkiSigning {
                    dir: dir.path().to_owned(),
                    days: 9,
                },
                file: file.to_owned(),
                names: vec!["localhost".to_owned()],
            };
            let text = issue_server(&server).unwrap();
            text.replace(&format!("{}/", dir.path().display()), "")
        };
        let text = issued("a");
        let flags = "flags of the server, towards agents, then towards clients on TCP, then towards peers:\n  \
             --cluster-cert=a-cluster.crt --cluster-key=a-cluster.key --cluster-ca-cert=agents-ca.crt\n  \
             --server-cert=a.crt --server-key=a.key --server-ca-cert=clients-ca.crt\n  \
             --peer-cert=a-peer.crt --peer-key=a-peer.key --peer-ca-cert=peers-ca.crt\n";
        assert!(text.ends_with(flags), "{text}");
        assert_eq!(text.matches("wrote a").count(), 6, "{text}");
        let shown = shown_file(&dir.path().join("a-peer.crt")).unwrap();
        for line in [
            "  issuer     CN=Adit peers CA ",
            "  names      dns:localhost\n",
            "  use        server, client\n",
        ] {
            assert!(shown.contains(line), "{line} in\n{shown}");
        }
        for ending in ["crt", "key"] {
            std::fs::remove_file(dir.path().join(format!("peers-ca.{ending}"))).unwrap();
        }
        let text = issued("b");
        let flags = "flags of the server, towards agents, then towards clients on TCP:\n  \
             --cluster-cert=b-cluster.crt --cluster-key=b-cluster.key --cluster-ca-cert=agents-ca.crt\n  \
             --server-cert=b.crt --server-key=b.key --server-ca-cert=clients-ca.crt\n";
        assert!(text.ends_with(flags), "{text}");
        assert_eq!(text.matches("wrote b").count(), 4, "{text}");
        assert!(dir.path().join("b.crt").exists() && !dir.path().join("b-peer.crt").exists());
    }

    #[test]
    fn a_certificate_is_shown_without_control_characters() {
        let dir = tempfile::tempdir().unwrap();
        pki::init(dir.path(), 30).unwrap();
        let wanted = client("agent-\u{61}", Authority::Agents, "a");
        pki::issue(dir.path(), 9, &[wanted]).unwrap();
        let path = dir.path().join("agent-a.crt");
        let text = shown_file(&path).unwrap();
        for line in [
            "  subject    CN=a\n",
            "  issuer     CN=Adit agents CA ",
            "  names      none\n",
            "  use        client\n",
            "  days left  8\n",
        ] {
            assert!(text.contains(line), "{line} in\n{text}");
        }
        let mut one = inspect::certificates(&path).unwrap().remove(0);
        one.names = vec!["dns:\x1b[2J".to_owned()];
        assert!(!shown(&one, one.not_before).contains('\x1b'));
        let key = dir.path().join("agent-a.key");
        let error = shown_file(&key).unwrap_err().to_string();
        assert!(
            error.ends_with("give a PEM file of certificates"),
            "{error}"
        );
    }
}
