"""The page in a real Chromium: orders by touch at phone width, and which snapshots are whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_browser import INGEST, enter, go, having, incident, wait_until, with_tokens
from tests.sidecar.test_verify import flip, snapshot
from tests.support.browser import Seen, browsing, opened
from tests.support.live import LiveTrainer
from tests.support.sidecars import ServeProcess, serving

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.torch]

PHONE = {"width": 390, "height": 844}
DASH = "\N{EN DASH}"
FINGER_PX = 44  # Apple and WCAG 2.5.5; 2.5.8 asks for 24


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsing() as found:
        yield found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the sidecar looks for snapshots."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory, runs: Path) -> Iterator[ServeProcess]:
    tokens = with_tokens(tmp_path_factory.mktemp("tokens"))
    with serving(*tokens, "--run-dir", str(runs)) as process:
        yield process


def healthy(trainer: LiveTrainer) -> list[int]:
    return [s.step for s in trainer.sim.state.ledger.snapshots if s.healthy]


def within(box: dict[str, float], wide: float, high: float) -> bool:
    """It can be seen and reached as a whole."""
    return (
        box["x"] >= 0
        and box["y"] >= 0
        and box["x"] + box["width"] <= wide
        and box["y"] + box["height"] <= high
    )


# ---- by touch -------------------------------------------------------------------------------


def test_every_order_is_given_by_touch_and_only_after_it_was_confirmed(
    sidecar: ServeProcess, browser: Any
) -> None:
    with (
        LiveTrainer(sidecar.url, "touched", token=INGEST, pause_s=0.02) as trainer,
        opened(browser, sidecar.url, touch=True, **PHONE) as seen,
    ):
        page = seen.page
        enter(seen, sidecar.url, run="touched")
        wait_until(lambda: len(healthy(trainer)) > 1, "a second healthy snapshot")
        page.locator(".badge", has_text="armed").first.wait_for()
        assert page.evaluate("matchMedia('(pointer: coarse)').matches")  # a finger

        sent: list[Any] = []
        page.route("**/commands", lambda route: sent.append(route))

        def given() -> int:
            return len(trainer.obeyed())

        def touch(name: str, sure: str) -> None:
            """Cancelled first, by a tap beside the button's middle; then meant."""
            button = page.locator(".actions").get_by_role("button", name=name)
            button.scroll_into_view_if_needed()
            box = button.bounding_box()
            assert box["height"] >= FINGER_PX, (name, box)
            assert 0 <= box["x"] <= PHONE["width"] - box["width"], (name, box)
            before = given()
            dialog = page.get_by_role("dialog")
            page.touchscreen.tap(box["x"] + 6, box["y"] + box["height"] - 6)
            dialog.wait_for()
            for text in ("Cancel", sure):
                inside = dialog.get_by_role("button", name=text, exact=True).bounding_box()
                assert inside["height"] >= FINGER_PX, (name, text, inside)
                assert within(inside, PHONE["width"], PHONE["height"]), (name, text, inside)
            dialog.get_by_role("button", name="Cancel").tap()
            dialog.wait_for(state="hidden")
            at = trainer.step
            wait_until(lambda: trainer.step > at + 5, "some steps")
            assert (sent, given()) == ([], before), name  # neither it alone nor Cancel does it
            button.tap()
            confirm = dialog.get_by_role("button", name=sure, exact=True)
            box = confirm.bounding_box()
            for _ in range(2):  # a nervous finger, and a slow network
                page.touchscreen.tap(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
            page.wait_for_timeout(300)
            [one] = sent
            sent.clear()
            one.continue_()
            dialog.wait_for(state="hidden")
            wait_until(lambda: given() > before or trainer.sim.halted, name)

        touch("Skip next step…", "Skip the next step")
        wait_until(lambda: trainer.acted("skip_step", "command"), "the skip")
        touch("Pause automation…", "Pause automation")
        page.get_by_text("Protection is off: a person paused automation.").wait_for()
        touch("Resume automation…", "Resume automation")
        page.get_by_text("Protection is off").wait_for(state="detached")
        touch("Roll back…", "Roll back")
        wait_until(lambda: trainer.acted("rollback", "command"), "the rollback")
        touch("Scale learning rate…", "Scale it")
        touch("Halt…", "Halt the run")
        wait_until(lambda: trainer.sim.halted, "the end")
        page.get_by_text("This run is over: it hears no order.").wait_for()
        assert page.locator(".actions button").count() == 0
        commands = [c for s in trainer.sim.steps for c in s.observation.commands]
        kinds = ["skip_next", "pause", "resume", "rollback", "scale_lr", "halt"]
        assert [str(c.kind) for c in commands] == kinds  # each once
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        assert seen.problems() == []


def test_a_finger_that_scrolls_over_the_buttons_orders_nothing(
    sidecar: ServeProcess, browser: Any
) -> None:
    with (
        LiveTrainer(sidecar.url, "scrolled", token=INGEST, pause_s=0.02) as trainer,
        opened(browser, sidecar.url, touch=True, **PHONE) as seen,
    ):
        page = seen.page
        enter(seen, sidecar.url, run="scrolled")
        page.locator("path.line").first.wait_for()
        button = page.locator(".actions").get_by_role("button", name="Skip next step…")
        box = button.bounding_box()
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        touches = page.context.new_cdp_session(page)

        def send(kind: str, at: list[dict[str, float]]) -> None:
            touches.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": at})

        before = page.evaluate("scrollY")
        send("touchStart", [{"x": x, "y": y}])
        for moved in range(20, 320, 20):
            send("touchMove", [{"x": x, "y": y - moved}])
        send("touchEnd", [])
        page.wait_for_function("y => scrollY > y + 100", arg=before)
        assert not page.get_by_role("dialog").is_visible()
        assert not trainer.obeyed()
        # And over a chart: it is no place where a phone sticks.
        chart = page.get_by_role("slider", name="Loss")
        chart.scroll_into_view_if_needed()
        box = chart.bounding_box()
        before = page.evaluate("scrollY")
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        send("touchStart", [{"x": x, "y": y}])
        for moved in range(20, 320, 20):
            send("touchMove", [{"x": x, "y": y + moved}])
        send("touchEnd", [])
        page.wait_for_function("y => scrollY < y - 100", arg=before)
        assert page.get_by_text("not following the run").count() == 0
        assert seen.problems() == []


# ---- which snapshots are whole --------------------------------------------------------------


def copy(step: int, disk: str, **more: Any) -> dict[str, Any]:
    """A row of `snapshots`, as the API gives it."""
    return {
        "step": step,
        "healthy": True,
        "quiet": 40,
        "name": f"{step:08}-0-1",
        "disk": disk,
        "detail": "",
        "checked_at": None,
        "checked_s_ago": None,
        "warning": "",
        **more,
    }


CRC = "__0_0.distcp is damaged: its CRC32 is 5bd8f1a0, and manifest-0.json says 77aa0c12"
WARNING = (
    f"the snapshot of step 1200 is damaged on disk ({CRC}). A rollback to it takes the copy in "
    "the trainer's memory, if there still is one; else the next older one, of step 1000 (verified)"
)
COPIES = [
    copy(1250, "none", healthy=False, quiet=7, detail="in the trainer's memory only", name=None),
    copy(1200, "damaged", detail=CRC, checked_at=1.7e9, checked_s_ago=7200.0, warning=WARNING),
    copy(1000, "sound", checked_at=1.7e9, checked_s_ago=300.0),
    copy(500, "unread", detail="it is on disk, and was not read again yet"),
]


def row(seen: Seen, step: str) -> Any:
    table = seen.page.get_by_role("table", name="Snapshots")
    return table.get_by_role("row").filter(has=seen.page.get_by_role("rowheader", name=step))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
def test_each_snapshot_says_in_words_whether_its_copy_is_whole(
    sidecar: ServeProcess, browser: Any, width: int, dark: bool, tmp_path: Path
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    name = f"copies-{width}-{dark}"
    with (
        LiveTrainer(sidecar.url, name, token=INGEST, pause_s=0.2),
        opened(browser, sidecar.url, width=width, height=844, dark=dark) as seen,
        having(seen, name, [], snapshots=COPIES, damaged_snapshots=1, step=1290),
    ):
        page, axe = seen.page, Axe()
        enter(seen, sidecar.url)
        go(seen, name)

        def check(where: str) -> None:
            page.screenshot(path=tmp_path / f"{name}-{where}.png", full_page=where == "page")
            found = axe.run(page).response["violations"]
            bad = [(v["id"], v["nodes"][0]["html"][:200]) for v in found]
            assert [v["id"] for v in found if v["impact"] in ("serious", "critical")] == [], bad
            assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, where

        said = {
            step: " ".join(row(seen, step).inner_text().split())
            for step in ("1,250", "1,200", "1,000", "500")
        }
        assert "healthy" in said["1,200"]
        assert f"✖damaged on disk {CRC}; read 2 h ago" in said["1,200"].replace("✖ ", "✖")
        assert "verified 5 min ago" in said["1,000"]
        assert "not verified it is on disk, and was not read" in said["500"]
        assert "candidate, 7 quiet steps" in said["1,250"]
        assert "not verified in the trainer's memory only" in said["1,250"]
        # The signs differ in shape, and are not read out.
        signs = page.locator(".copy .badge > span[aria-hidden=true]").all_inner_texts()
        assert signs == [DASH, "✖", "✓", DASH]
        page.get_by_text(f"T{WARNING[1:]}.").wait_for()  # at the top
        fact = page.locator("dl.facts div", has_text="Healthy snapshot")
        assert fact.inner_text().split("\n")[-1] == "newest; damaged on disk"
        check("page")

        label = "Roll back to step 1200, whose copy on disk is damaged…"
        page.get_by_role("button", name=label).click()
        dialog = page.get_by_role("dialog")
        select = dialog.get_by_label("Snapshot")
        assert select.evaluate("e => e.selectedOptions[0].textContent") == (
            "step 1,200: damaged on disk"
        )
        described = page.locator(f"#{select.get_attribute('aria-describedby')}")
        assert described.inner_text() == f"✖ T{WARNING[1:]}. You can still order it."
        assert described.get_attribute("role") == "status"  # told when it changes
        check("dialog")
        select.select_option("1000")
        assert described.inner_text() == "✓ Verified 5 min ago."
        select.select_option("500")
        assert described.inner_text().startswith(
            f"{DASH} Not verified: it is on disk, and was not read"
        )
        select.select_option("")  # the newest
        assert described.inner_text().startswith("✖ The snapshot of step 1200 is damaged on disk")
        assert [p for p in seen.problems() if "axe" not in p] == []


def test_where_no_snapshot_can_be_seen_the_reason_stands_once(
    sidecar: ServeProcess, browser: Any
) -> None:
    why = "this sidecar sees no snapshots: start it with --run-dir RUN_DIR"
    unseen = [copy(step, "unseen", detail=why) for step in (1000, 500)]
    with (
        LiveTrainer(sidecar.url, "unseen", token=INGEST, pause_s=0.2),
        opened(browser, sidecar.url, **PHONE) as seen,
        having(seen, "unseen", [], snapshots=unseen, step=1290),
    ):
        enter(seen, sidecar.url)
        go(seen, "unseen")
        assert seen.page.get_by_text(f"Not verified: {why}.").count() == 1
        assert row(seen, "500").get_by_text("not verified").count() == 1
        assert seen.page.locator(".note.bad").count() == 0
        assert seen.problems() == []


def test_what_the_disk_has_lost_is_seen_announced_and_gone_back_to_all_the_same(
    sidecar: ServeProcess, runs: Path, browser: Any
) -> None:
    with (
        LiveTrainer(sidecar.url, "kept", token=INGEST, pause_s=0.01) as trainer,
        opened(browser, sidecar.url, touch=True, **PHONE) as seen,
    ):
        page = seen.page
        wait_until(lambda: len(healthy(trainer)) > 1, "a second healthy snapshot")
        trainer._pause_s = 3.0  # so that it stays the newest
        older, newest = healthy(trainer)[-2:]
        snapshot(runs / "kept", older, run="kept")
        enter(seen, sidecar.url, run="kept")
        row(seen, str(older)).get_by_text("✓verified").wait_for()
        assert "in the trainer's memory only" in row(seen, str(newest)).inner_text()
        page.evaluate(
            """() => {
                window.heard = [];
                new MutationObserver(() =>
                    window.heard.push(document.getElementById('said').textContent)
                ).observe(document.getElementById('said'), {childList: true});
            }"""
        )
        flip(snapshot(runs / "kept", newest, run="kept") / "__0_0.distcp")
        row(seen, str(newest)).get_by_text("damaged on disk").first.wait_for()
        page.wait_for_function("() => window.heard.join().includes('is damaged on disk')")
        trainer._pause_s = 0.01
        back = row(seen, str(newest)).get_by_role("button")
        assert back.bounding_box()["height"] >= FINGER_PX
        back.tap()
        dialog = page.get_by_role("dialog")
        dialog.get_by_text(f"else the next older one, of step {older} (verified)").wait_for()
        dialog.get_by_role("button", name="Roll back", exact=True).tap()
        wait_until(lambda: trainer.acted("rollback", "command"), "the rollback")
        page.get_by_role("link", name="← All runs").tap()
        listed = page.get_by_role("row").filter(has=page.get_by_role("link", name="kept"))
        listed.wait_for()
        assert seen.problems() == []


def test_the_list_of_runs_shows_which_have_a_damaged_snapshot(
    sidecar: ServeProcess, browser: Any
) -> None:
    with (
        LiveTrainer(sidecar.url, "broken", token=INGEST, pause_s=0.1),
        LiveTrainer(sidecar.url, "a-whole-one", token=INGEST, pause_s=0.1),
        opened(browser, sidecar.url) as seen,
    ):

        def listed(route: Any) -> None:
            answer = route.fetch()
            told = answer.json()
            runs = [
                r | {"damaged_snapshots": 2 if r["run"] == "broken" else 0, "protection": "armed"}
                for r in told["runs"]
                if r["run"] in ("broken", "a-whole-one")
            ]
            route.fulfill(response=answer, json=told | {"runs": runs})

        seen.page.route("**/v1/runs", listed)
        enter(seen, sidecar.url)
        seen.page.get_by_text("2 damaged snapshots").wait_for()
        assert seen.page.locator("tbody th").all_inner_texts() == ["broken", "a-whole-one"]
        seen.page.get_by_text("1 needs a look · 2 running").wait_for()


# ---- what was left off without a word --------------------------------------------------------


def test_what_is_not_listed_is_counted(sidecar: ServeProcess, browser: Any) -> None:
    order = {"command": {"kind": "pause", "target": None, "value": 1.0, "issued_by": "ann"}}
    orders = [
        {"command": order["command"] | {"id": f"o{n}"}, "state": "expired", "taken_step": None}
        for n in range(12)
    ]
    known = [incident(n, "instability", state="resolved") for n in range(9, 41)]
    with (
        LiveTrainer(sidecar.url, "long-ago", token=INGEST, pause_s=0.1),
        opened(browser, sidecar.url, **PHONE) as seen,
    ):
        ledger = {"incidents": known, "next_incident": 41, "snapshots": [], "counters": {}}
        told: dict[str, Any] = {"ledger": ledger, "orders": orders, "snapshots": []}
        for watched in (True, False):
            with having(seen, "long-ago", known, **told, watched=watched):
                page = seen.page
                if watched:
                    enter(seen, sidecar.url, run="long-ago")
                else:
                    page.reload()
                page.get_by_text("8 earlier ones are not shown, incidents and advice").wait_for()
                why = "its ledger keeps the open ones" if watched else "record does not hold them"
                page.get_by_text(why).wait_for()
                given = page.get_by_role("list", name="Orders given")
                assert given.get_by_role("listitem").count() == 6
                assert given.get_by_text("7 earlier: sentinel audit long-ago").count() == 1
        with having(seen, "long-ago", known, **told | {"ledger": ledger | {"next_incident": 1}}):
            seen.page.reload()
            seen.page.get_by_role("list", name="Orders given").wait_for()
            assert seen.page.get_by_text("not shown, incidents").count() == 0


def test_a_trainer_that_comes_back_is_announced(sidecar: ServeProcess, browser: Any) -> None:
    with opened(browser, sidecar.url) as seen:
        with LiveTrainer(sidecar.url, "again", token=INGEST, pause_s=0.05) as trainer:
            wait_until(lambda: trainer.step > 3, "some steps")
            enter(seen, sidecar.url, run="again")
        seen.page.get_by_text("This run is over").wait_for()
        seen.page.locator("#live[data-state=live]").wait_for()
        with LiveTrainer(sidecar.url, "again", token=INGEST, pause_s=0.05):
            seen.page.wait_for_function(
                "() => document.getElementById('said').textContent.includes"
                "('Its trainer has registered again')"
            )
            fact = seen.page.locator("dl.facts div", has_text="Registered")
            fact.get_by_text("ago").wait_for()
        assert seen.problems() == []
