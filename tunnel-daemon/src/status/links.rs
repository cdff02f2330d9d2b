//! `adit links`, `adit drain` and `adit unlink`.

use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use super::client::Socket;
use super::model::{LinkStatus, Links, Role};
use super::text::{age, clean, labelled, show};
use adit_config::{LinksAction, LinksOptions};

/// Columns before a text.
const INDENT: usize = 13;

/// Lists links, or has the server change them, and prints the affected links.
///
/// # Errors
/// No answer, no such link, or standard output is closed.
pub fn run(options: &LinksOptions) -> anyhow::Result<ExitCode> {
    let socket = Socket::of(&options.socket)?;
    let mut question = form_urlencoded::Serializer::new(String::new());
    if let Some(agent) = &options.agent {
        question.append_pair("agent", agent);
    }
    if let Some(link) = options.link {
        question.append_pair("link", &link.to_string());
    }
    let question = question.finish();
    let change = match options.action {
        LinksAction::Show => {
            let path = format!("/v1/links?{question}");
            let text = match options.json {
                true => format!("{}\n", socket.text(&path)?),
                false => table(&socket.ask(&path)?),
            };
            show(&text)?;
            return Ok(ExitCode::SUCCESS);
        }
        LinksAction::Drain => "drain",
        LinksAction::Unlink => "unlink",
    };
    let changed: Links = socket.change(&format!("/v1/{change}?{question}"))?;
    anyhow::ensure!(
        !changed.links.is_empty(),
        "no such link; `adit links` shows those that there are"
    );
    show(&outcome(&changed, options.action))?;
    Ok(ExitCode::SUCCESS)
}

fn outcome(changed: &Links, action: LinksAction) -> String {
    let (does, then) = match action {
        LinksAction::Unlink => (
            "ends",
            "the agent reconnects unless --agent-deny lists it\n",
        ),
        LinksAction::Drain | LinksAction::Show => (
            "drains",
            "new tunnels go to other agents that serve the same destinations, if any;\n\
             `adit unlink` ends the drain: the agent links again, and takes tunnels\n",
        ),
    };
    let mut out = String::new();
    for link in &changed.links {
        let number = link.link.unwrap_or_default();
        let _infallible = writeln!(out, "link {number} of {} {does}", clean(&link.peer, 40));
    }
    out + then
}

fn table(links: &Links) -> String {
    if links.links.is_empty() {
        return "no links\n".to_owned();
    }
    let mut out = String::new();
    for link in &links.links {
        for (name, text) in rows(link, links.role) {
            out += &labelled(name, INDENT, &text);
        }
        out.push('\n');
    }
    let shown = links.links.len() as u64;
    if links.links_total > shown {
        let _infallible = writeln!(out, "and {} more", links.links_total - shown);
    }
    out
}

fn rows(link: &LinkStatus, role: Role) -> Vec<(&'static str, String)> {
    let number = link.link.map(|number| format!("{number}, "));
    let number = number.unwrap_or_default();
    let age = age(Duration::from_secs(link.age_seconds));
    let (condition, dialect) = (&link.condition, &link.dialect);
    let version = link.version.as_ref().map(|version| format!(" {version}"));
    let version = version.unwrap_or_default();
    let mut rows = vec![
        match role {
            Role::Server => ("agent", link.peer.clone()),
            Role::Agent | Role::Proxy => ("server", link.peer.clone()),
        },
        (
            "  link",
            format!("{number}{condition} for {age}, {dialect}{version}"),
        ),
        ("  address", link.address.clone()),
    ];
    if role == Role::Server {
        let proved = link.principal.as_deref().unwrap_or("nothing");
        rows.push(("  has proved", proved.to_owned()));
        let claims = link.identifiers.as_deref().filter(|text| !text.is_empty());
        rows.push(("  claims", claims.unwrap_or("no identifiers").to_owned()));
    }
    let lanes = link.lanes.map_or_else(
        || "no lanes".to_owned(),
        |lanes| format!("{} lanes busy, {} idle", lanes.busy, lanes.idle),
    );
    rows.push(("  tunnels", format!("{}; {lanes}", link.tunnels)));
    if let Some(dials) = &link.dials {
        let text = format!(
            "{} answered in time, {} slow, {} failed",
            dials.answered, dials.slow, dials.failed
        );
        rows.push(("  dials", text));
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::super::tests::status;
    use super::super::text::WIDTH;
    use super::*;

    fn links() -> Links {
        let mut links = status().links;
        links.truncate(2);
        links[0].principal = Some(format!("CN=\x1b[2J{}", "x".repeat(200)));
        links[1].principal = None;
        Links {
            api: 1,
            role: Role::Server,
            id: "s".to_owned(),
            links,
            links_total: 7,
        }
    }

    #[test]
    fn lines_fit_the_terminal_and_have_no_control_characters() {
        let text = table(&links());
        for line in text.lines() {
            assert!(line.chars().count() <= WIDTH, "{line:?}");
            assert!(!line.contains(char::is_control), "{line:?}");
        }
        for part in [
            "  link       7, draining for 12d",
            "  has proved nothing",
            "  claims     host=a",
            "9999 lanes busy, 9999 idle",
            " in time, 1 slow, 2 failed",
            "and 5 more",
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        for action in [LinksAction::Drain, LinksAction::Unlink] {
            let text = outcome(&links(), action);
            let fits = text.lines().all(|line| line.chars().count() <= WIDTH);
            assert!(fits && !text.contains('\x1b'), "{text}");
        }
    }
}
