"""Tokens, roles and limits: who is let in, and what is never shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from sentinel.core.errors import ConfigError
from sentinel.sidecar.security import Access, Limits, Role

LONG = "0123456789abcdef"


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


class TestTokens:
    def test_a_token_opens_what_its_role_opens_and_no_more(self, tmp_path: Path) -> None:
        files = [(role, write(tmp_path / role, f"{role.value:_<16}")) for role in Role]
        access = Access.load(files)
        may = {
            role: {
                other
                for other in Role
                if (who := access.who(f"Bearer {role.value:_<16}")) and who.may(other)
            }
            for role in Role
        }
        assert may == {
            Role.READ: {Role.READ},
            Role.INGEST: {Role.INGEST},
            Role.CONTROL: {Role.CONTROL, Role.READ},
        }
        assert access.seal_keys == ("ingest__________",)

    def test_a_token_without_a_name_is_called_after_its_role(self, tmp_path: Path) -> None:
        path = write(tmp_path / "t", f"# on-call\n\nann {LONG}\n{LONG}-new\n")
        access = Access.load([(Role.CONTROL, path)])
        names = [getattr(access.who(f"Bearer {t}"), "name", None) for t in (LONG, f"{LONG}-new")]
        assert names == ["ann", "control"]

    def test_the_shared_token_opens_everything(self) -> None:
        caller = Access.load(shared="secret").who("Bearer secret")
        assert caller is not None
        assert caller.roles == frozenset(Role)
        assert caller.name == "shared"

    @pytest.mark.parametrize(
        "header",
        ["", "Bearer", "Bearer ", f"Basic {LONG}", LONG, f"Bearer {LONG[:-1]}", f"Bearer {LONG}x"],
    )
    def test_whatever_is_not_the_token_opens_nothing(self, tmp_path: Path, header: str) -> None:
        access = Access.load([(Role.READ, write(tmp_path / "t", LONG))])
        assert access.who(header) is None
        assert Access().who(header) is None

    def test_one_token_for_two_roles_has_both(self, tmp_path: Path) -> None:
        path = write(tmp_path / "t", LONG)
        access = Access.load([(Role.INGEST, path), (Role.READ, path)])
        caller = access.who(f"bearer {LONG}")
        assert caller is not None
        assert caller.roles == {Role.INGEST, Role.READ}

    def test_two_people_with_one_token_are_refused(self, tmp_path: Path) -> None:
        path = write(tmp_path / "t", f"ann {LONG}\nbob {LONG}\n")
        with pytest.raises(ConfigError, match="'ann' and 'bob' are equal") as caught:
            Access.load([(Role.CONTROL, path)])
        assert LONG not in str(caught.value)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("", "holds no token"),
            ("# only a comment\n", "holds no token"),
            ("x\nann short\n", "line 1: a token must have 16 to 512 characters, got 1"),
            ("a b c\n", "line 1: must be NAME TOKEN, got 3 words"),
            (f"ann {LONG}é\n", "printable ASCII"),
            (f"local {LONG}\n", "not be 'local'"),
        ],
    )
    def test_a_bad_file_is_named_with_its_line(self, tmp_path: Path, text: str, said: str) -> None:
        path = write(tmp_path / "t", text)
        with pytest.raises(ConfigError, match=said) as caught:
            Access.load([(Role.READ, path)])
        assert str(path) in str(caught.value)

    def test_a_file_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot be read: No such file"):
            Access.load([(Role.READ, tmp_path / "none")])

    def test_no_token_shows_in_a_repr_or_an_error(self, tmp_path: Path) -> None:
        access = Access.load([(Role.READ, write(tmp_path / "t", f"ann {LONG}"))])
        assert LONG not in repr(vars(access)["_tokens"])
        assert "ann" in repr(vars(access)["_tokens"])

    def test_without_tokens_nothing_is_asked_for(self) -> None:
        assert not Access().configured
        assert Access().seal_keys == ("",)


class TestLimits:
    def test_a_burst_passes_and_then_so_many_a_minute(self) -> None:
        limits = Limits(per_minute=60, burst=3)
        assert [limits.wait("r", 0.0) for _ in range(3)] == [0.0] * 3
        assert limits.wait("r", 0.0) == pytest.approx(1.0)
        assert limits.wait("r", 0.5) == pytest.approx(0.5)
        assert limits.wait("r", 1.0) == 0.0
        assert limits.wait("r", 1.0) > 0.0

    def test_one_key_does_not_use_up_anothers(self) -> None:
        limits = Limits(per_minute=60, burst=1)
        assert limits.wait("a", 0.0) == 0.0
        assert limits.wait("b", 0.0) == 0.0
        assert limits.wait("a", 0.0) > 0.0

    def test_a_clock_set_back_blocks_nobody_for_ever(self) -> None:
        limits = Limits(per_minute=60, burst=1)
        assert limits.wait("a", 1000.0) == 0.0
        assert limits.wait("a", 0.0) == pytest.approx(1.0)
        assert limits.wait("a", 1.0) == 0.0

    def test_blocked_looks_and_takes_nothing(self) -> None:
        limits = Limits(per_minute=60, burst=1)
        assert [limits.blocked("a", 0.0) for _ in range(3)] == [0.0] * 3
        limits.wait("a", 0.0)
        assert limits.blocked("a", 0.25) == pytest.approx(0.75)

    def test_it_remembers_a_bounded_number_of_keys(self) -> None:
        limits = Limits(per_minute=60, burst=1, keys=2)
        for key in "abc":
            assert limits.wait(key, 0.0) == 0.0
        assert limits.wait("a", 0.0) == 0.0  # forgotten, and so let in again
        assert limits.wait("c", 0.0) > 0.0
