"""`python -m regrow.head`."""

from regrow.head.main import main

raise SystemExit(main())
